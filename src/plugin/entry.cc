// The one exported symbol of libggml-kvasir.so.

#include "plugin/ggml_abi.h"

ggml_backend_reg_t ggml_backend_init(void) { return kvasir::plugin::backend_reg(); }
