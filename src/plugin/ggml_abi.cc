#include "plugin/ggml_abi.h"

#include <format>

namespace kvasir::plugin {

Status check_host(int backend_api, std::string_view ggml_version) {
  if (backend_api == kGgmlBackendApi && ggml_version.starts_with(kGgmlVersionPrefix)) return {};
  return fatal(std::format(
      "this plugin knows ggml {}x with backend API {}, and the running ggml is {} with backend API {}; install the kvasir "
      "plugin built for it, or llama.cpp with libggml0 {}x.",
      kGgmlVersionPrefix, kGgmlBackendApi, ggml_version, backend_api, kGgmlVersionPrefix));
}

}  // namespace kvasir::plugin
