#include "cli/lan.h"

#include <cstdio>
#include <format>

#include "discovery/finder.h"

namespace kvasir::cli {

using discovery::Kind;
using discovery::Service;

Result<std::string> choose_hub(const std::vector<Service>& found, const std::string& ca_file) {
  std::string list, only;
  std::size_t n = 0;
  for (const Service& service : found) {
    if (service.kind != Kind::kHub) continue;
    only = service.link();
    list += std::format("{}{} ({})", ++n > 1 ? ", " : "", only, service.name);
  }
  if (n == 0) return fix_input("no hub was named, and none announces itself on this network; give its https://HOST.");
  if (n > 1) return fix_input(std::format("no hub was named, and several announce themselves here: {}; name one.", list));
  if (ca_file.empty())
    return fix_input(std::format("no hub was named. One announces itself here: {}. Anybody can announce a hub, and it would be "
                                 "shown your token: name it if it is yours, or give its certificate (--ca-file).",
                                 list));
  return only;
}

Result<std::string> find_hub(const std::string& ca_file) {
  KVASIR_ASSIGN(const std::vector<Service> found, discovery::find_services());
  KVASIR_ASSIGN(std::string url, choose_hub(found, ca_file));
  std::fprintf(stderr, "the hub of this network: %s\n", url.c_str());
  return url;
}

}  // namespace kvasir::cli
