// For LD_PRELOAD in tests: a ggml of a version that the plugin does not know.
const char* ggml_version(void);
const char* ggml_version(void) { return "9.99.0"; }
