// The binary interface between ggml and a backend library, API version 3 (ggml 0.27).
//
// ggml ships no header for it, so the plugin states here what it relies on: the order of
// the function tables, read off live objects, and the four structures they sit in. Nothing
// outside this folder includes this file. check_host() compares the running ggml with what
// is stated here before any table is handed over: a ggml with another interface is refused
// in words instead of being called through the wrong slot.
#pragma once

#include <ggml-backend.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"

namespace kvasir::plugin {

inline constexpr int kGgmlBackendApi = 3;
inline constexpr std::string_view kGgmlVersionPrefix = "0.27.";

// What the running process offers: the CPU backend's API version and ggml_version().
Status check_host(int backend_api, std::string_view ggml_version);

// The plugin's registry, or null (with a sentence on stderr) where it refuses to load.
ggml_backend_reg_t backend_reg() noexcept;

}  // namespace kvasir::plugin

extern "C" {

struct ggml_backend_buffer_type_i {
  const char* (*get_name)(ggml_backend_buffer_type_t);
  ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, std::size_t);
  ggml_backend_buffer_t (*alloc_buffer_n)(ggml_backend_buffer_type_t, ggml_tensor**, int);  // may be null
  std::size_t (*get_alignment)(ggml_backend_buffer_type_t);
  std::size_t (*get_max_size)(ggml_backend_buffer_type_t);                                  // null: no limit
  std::size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor*);            // null: ggml_nbytes
  std::size_t (*get_alloc_size_n)(ggml_backend_buffer_type_t, ggml_tensor**, int);          // may be null
  bool (*is_host)(ggml_backend_buffer_type_t);                                              // null: false
};

struct ggml_backend_buffer_type {
  ggml_backend_buffer_type_i iface;
  ggml_backend_dev_t device;
  void* context;
};

struct ggml_backend_buffer_i {
  void (*free_buffer)(ggml_backend_buffer_t);
  void* (*get_base)(ggml_backend_buffer_t);
  ggml_status (*init_tensor)(ggml_backend_buffer_t, ggml_tensor*);
  void (*memset_tensor)(ggml_backend_buffer_t, ggml_tensor*, std::uint8_t, std::size_t, std::size_t);
  void (*set_tensor)(ggml_backend_buffer_t, ggml_tensor*, const void*, std::size_t, std::size_t);
  void (*get_tensor)(ggml_backend_buffer_t, const ggml_tensor*, void*, std::size_t, std::size_t);
  void (*set_tensor_2d)(ggml_backend_buffer_t, ggml_tensor*, const void*, std::size_t, std::size_t, std::size_t,
                        std::size_t, std::size_t);
  void (*get_tensor_2d)(ggml_backend_buffer_t, const ggml_tensor*, void*, std::size_t, std::size_t, std::size_t,
                        std::size_t, std::size_t);
  bool (*cpy_tensor)(ggml_backend_buffer_t, const ggml_tensor*, ggml_tensor*);
  void (*clear)(ggml_backend_buffer_t, std::uint8_t);
  void (*reset)(ggml_backend_buffer_t);
};

struct ggml_backend_buffer {
  ggml_backend_buffer_i iface;
  ggml_backend_buffer_type_t buft;
  void* context;
  std::size_t size;
  ggml_backend_buffer_usage usage;
};

struct ggml_backend_i {
  const char* (*get_name)(ggml_backend_t);
  void (*free)(ggml_backend_t);
  void (*set_tensor_async)(ggml_backend_t, ggml_tensor*, const void*, std::size_t, std::size_t);
  void (*get_tensor_async)(ggml_backend_t, const ggml_tensor*, void*, std::size_t, std::size_t);
  void (*set_tensor_2d_async)(ggml_backend_t, ggml_tensor*, const void*, std::size_t, std::size_t, std::size_t,
                              std::size_t, std::size_t);
  void (*get_tensor_2d_async)(ggml_backend_t, const ggml_tensor*, void*, std::size_t, std::size_t, std::size_t,
                              std::size_t, std::size_t);
  bool (*cpy_tensor_async)(ggml_backend_t, ggml_backend_t, const ggml_tensor*, ggml_tensor*);
  void (*synchronize)(ggml_backend_t);
  ggml_backend_graph_plan_t (*graph_plan_create)(ggml_backend_t, const ggml_cgraph*);
  void (*graph_plan_free)(ggml_backend_t, ggml_backend_graph_plan_t);
  void (*graph_plan_update)(ggml_backend_t, ggml_backend_graph_plan_t, const ggml_cgraph*);
  ggml_status (*graph_plan_compute)(ggml_backend_t, ggml_backend_graph_plan_t);
  ggml_status (*graph_compute)(ggml_backend_t, ggml_cgraph*);
  void (*event_record)(ggml_backend_t, ggml_backend_event_t);
  void (*event_wait)(ggml_backend_t, ggml_backend_event_t);
  void (*graph_optimize)(ggml_backend_t, ggml_cgraph*);
};

struct ggml_backend {
  ggml_guid_t guid;
  ggml_backend_i iface;
  ggml_backend_dev_t device;
  void* context;
};

struct ggml_backend_event {
  ggml_backend_dev_t device;
  void* context;
};

struct ggml_backend_device_i {
  const char* (*get_name)(ggml_backend_dev_t);
  const char* (*get_description)(ggml_backend_dev_t);
  void (*get_memory)(ggml_backend_dev_t, std::size_t* free, std::size_t* total);
  enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t);
  void (*get_props)(ggml_backend_dev_t, ggml_backend_dev_props*);
  ggml_backend_t (*init_backend)(ggml_backend_dev_t, const char* params);
  ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t);
  ggml_backend_buffer_type_t (*get_host_buffer_type)(ggml_backend_dev_t);
  ggml_backend_buffer_t (*buffer_from_host_ptr)(ggml_backend_dev_t, void*, std::size_t, std::size_t);
  bool (*supports_op)(ggml_backend_dev_t, const ggml_tensor*);
  bool (*supports_buft)(ggml_backend_dev_t, ggml_backend_buffer_type_t);
  bool (*offload_op)(ggml_backend_dev_t, const ggml_tensor*);
  ggml_backend_event_t (*event_new)(ggml_backend_dev_t);
  void (*event_free)(ggml_backend_dev_t, ggml_backend_event_t);
  void (*event_synchronize)(ggml_backend_dev_t, ggml_backend_event_t);
};

struct ggml_backend_device {
  ggml_backend_device_i iface;
  ggml_backend_reg_t reg;
  void* context;
};

struct ggml_backend_reg_i {
  const char* (*get_name)(ggml_backend_reg_t);
  std::size_t (*get_device_count)(ggml_backend_reg_t);
  ggml_backend_dev_t (*get_device)(ggml_backend_reg_t, std::size_t);
  void* (*get_proc_address)(ggml_backend_reg_t, const char*);
};

struct ggml_backend_reg {
  int api_version;
  ggml_backend_reg_i iface;
  void* context;
};

// Exported by ggml-base, not declared in its public headers.
GGML_API ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t buft, ggml_backend_buffer_i iface,
                                                        void* context, std::size_t size);

// The entry ggml calls after loading the library.
__attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void);

}  // extern "C"
