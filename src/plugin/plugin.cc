// The library's entry and the tables ggml calls: registry, device, backend. Nothing here
// may throw: the callers are C.

#include <cstring>
#include <exception>
#include <format>
#include <new>

#include "plugin/backend.h"
#include "plugin/buffers.h"
#include "plugin/config.h"
#include "plugin/ggml_abi.h"
#include "plugin/runtime.h"
#include "plugin/shared_expert.h"

namespace kvasir::plugin {
namespace {

ggml_backend_reg g_reg{};
ggml_backend_device g_device{};
ggml_backend_buffer_type_t g_buffer_type = nullptr;
ggml_guid g_guid = {0x6b, 0x76, 0x61, 0x73, 0x69, 0x72, 0x2d, 0x65, 0x78, 0x70, 0x65, 0x72, 0x74, 0x73, 0x00, 0x01};

// Runs `body`; an exception (bad_alloc, in practice) becomes `otherwise` and a line.
template <typename T, typename Body>
T guarded(const char* what, T otherwise, Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& e) {
    log_line(std::format("{} failed: {}.", what, e.what()));
  } catch (...) {
    log_line(std::format("{} failed.", what));
  }
  return otherwise;
}

Backend& self(ggml_backend_t backend) { return *static_cast<Backend*>(backend->context); }

// --- backend ----------------------------------------------------------------------------
const char* backend_name(ggml_backend_t) noexcept { return "KVASIR0"; }

void backend_free(ggml_backend_t backend) noexcept {
  delete static_cast<Backend*>(backend->context);
  delete backend;
}

ggml_status backend_compute(ggml_backend_t backend, ggml_cgraph* graph) noexcept {
  return guarded("computing the experts", GGML_STATUS_FAILED, [&] {
    const Status status = self(backend).compute(graph);
    if (status) return GGML_STATUS_SUCCESS;
    log_line(status.error().message);
    return GGML_STATUS_FAILED;
  });
}

void backend_set_n_threads(ggml_backend_t backend, int n_threads) noexcept { self(backend).set_n_threads(n_threads); }

// --- handing weights over ------------------------------------------------------------------
// With KVASIR_REPLICA=none llama.cpp reads the file into staging buffers, which it asks for
// only of devices with "asynchronous" uploads and events. Ours are over when they return: the
// bytes are dropped but for a few. Holes of the file are then read as fast as they are zeros.
bool drops_weights() { return Runtime::instance()->config().replica == Replica::kNone; }

void backend_set_tensor(ggml_backend_t, ggml_tensor* t, const void* data, std::size_t offset, std::size_t size) noexcept {
  ggml_backend_tensor_set(t, data, offset, size);
}
void backend_event_record(ggml_backend_t, ggml_backend_event_t) noexcept {}
void backend_event_wait(ggml_backend_t, ggml_backend_event_t) noexcept {}
ggml_backend_event_t device_event_new(ggml_backend_dev_t dev) noexcept {
  auto* event = new (std::nothrow) ggml_backend_event{};
  if (event != nullptr) event->device = dev;
  return event;
}
void device_event_free(ggml_backend_dev_t, ggml_backend_event_t event) noexcept { delete event; }
void device_event_synchronize(ggml_backend_dev_t, ggml_backend_event_t) noexcept {}
ggml_backend_buffer_type_t device_staging_type(ggml_backend_dev_t) noexcept { return drops_weights() ? staging_buffer_type() : nullptr; }

// --- device -----------------------------------------------------------------------------
const char* device_name(ggml_backend_dev_t) noexcept { return "KVASIR0"; }
const char* device_description(ggml_backend_dev_t) noexcept { return "Kvasir: routed experts on workers"; }
void device_memory(ggml_backend_dev_t, std::size_t* free, std::size_t* total) noexcept { *free = *total = 0; }
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) noexcept { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void device_props(ggml_backend_dev_t dev, ggml_backend_dev_props* props) noexcept {
  props->name = device_name(dev);
  props->description = device_description(dev);
  props->type = device_type(dev);
  props->device_id = nullptr;
  device_memory(dev, &props->memory_free, &props->memory_total);
  props->caps = {};
  props->caps.buffer_from_host_ptr = Runtime::instance()->config().replica == Replica::kMmap;
  props->caps.mmap_support = !drops_weights();
  props->caps.async = props->caps.host_buffer = props->caps.events = drops_weights();
}

ggml_backend_t device_init(ggml_backend_dev_t dev, const char*) noexcept {
  return guarded("starting the backend", ggml_backend_t{}, [&]() -> ggml_backend_t {
    Result<std::unique_ptr<Backend>> made = Backend::create(*Runtime::instance());
    if (!made) {
      log_line(made.error().message);
      return nullptr;
    }
    auto* backend = new ggml_backend{};
    backend->guid = &g_guid;
    backend->iface.get_name = backend_name;
    backend->iface.free = backend_free;
    backend->iface.graph_compute = backend_compute;
    backend->iface.set_tensor_async = backend_set_tensor;
    backend->iface.event_record = backend_event_record;
    backend->iface.event_wait = backend_event_wait;
    backend->device = dev;
    backend->context = made->release();
    return backend;
  });
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) noexcept { return g_buffer_type; }

ggml_backend_buffer_t device_buffer_from_host_ptr(ggml_backend_dev_t, void* data, std::size_t size, std::size_t) noexcept {
  return buffer_from_host_memory(data, size);
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor* op) noexcept {
  static constexpr OpClaims kClaims{is_our_buffer};
  const bool shared = Runtime::instance()->config().overlap && claims_shared_expert(op, is_our_buffer);
  if (!shared && !kClaims.claims(op)) return false;
  // What is computed here runs on the CPU backend, so it must know the types as well.
  static ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  return op->op == GGML_OP_NONE || (cpu != nullptr && ggml_backend_dev_supports_op(cpu, op));
}

bool device_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t type) noexcept {
  return is_our_buffer_type(type) || ggml_backend_buft_is_host(type);
}

// --- registry ---------------------------------------------------------------------------
const char* reg_name(ggml_backend_reg_t) noexcept { return "Kvasir"; }
std::size_t reg_device_count(ggml_backend_reg_t) noexcept { return 1; }
ggml_backend_dev_t reg_device(ggml_backend_reg_t, std::size_t index) noexcept { return index == 0 ? &g_device : nullptr; }

void* reg_proc_address(ggml_backend_reg_t, const char* name) noexcept {
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) return reinterpret_cast<void*>(&backend_set_n_threads);
  return nullptr;
}

void weights_freed(const void* begin, std::size_t bytes) {
  if (Runtime* runtime = Runtime::instance()) runtime->forget(begin, bytes);
}

Result<ggml_backend_reg_t> init() {
  // ggml loads its own backends before this library, so the CPU's registry is there to compare with.
  ggml_backend_reg_t cpu = ggml_backend_reg_by_name("CPU");
  if (cpu == nullptr) return fatal("ggml's CPU backend is not loaded; install the package libggml0.");
  KVASIR_TRY(check_host(cpu->api_version, ggml_version()));
  std::vector<std::string> warnings;
  KVASIR_ASSIGN(Config config, load_config_from_environment(warnings));
  for (const std::string& warning : warnings) log_line(warning);
  KVASIR_TRY(Runtime::create(std::move(config)));

  g_device.iface.get_name = device_name;
  g_device.iface.get_description = device_description;
  g_device.iface.get_memory = device_memory;
  g_device.iface.get_type = device_type;
  g_device.iface.get_props = device_props;
  g_device.iface.init_backend = device_init;
  g_device.iface.get_buffer_type = device_buffer_type;
  g_device.iface.get_host_buffer_type = device_staging_type;
  g_device.iface.buffer_from_host_ptr = device_buffer_from_host_ptr;
  g_device.iface.supports_op = device_supports_op;
  g_device.iface.supports_buft = device_supports_buft;
  g_device.iface.event_new = device_event_new;
  g_device.iface.event_free = device_event_free;
  g_device.iface.event_synchronize = device_event_synchronize;
  g_device.reg = &g_reg;
  g_buffer_type = init_buffer_type(&g_device, weights_freed, /*keep_weights=*/!drops_weights());

  g_reg.api_version = kGgmlBackendApi;
  g_reg.iface.get_name = reg_name;
  g_reg.iface.get_device_count = reg_device_count;
  g_reg.iface.get_device = reg_device;
  g_reg.iface.get_proc_address = reg_proc_address;
  return &g_reg;
}

}  // namespace
}  // namespace kvasir::plugin

namespace kvasir::plugin {

ggml_backend_reg_t backend_reg() noexcept {
  // Once: a second load of the same library gets the same answer.
  static const ggml_backend_reg_t reg = guarded("loading the plugin", ggml_backend_reg_t{}, []() -> ggml_backend_reg_t {
    auto made = init();
    if (made) return *made;
    log_line(std::format("not loaded: {}", made.error().message));
    return nullptr;
  });
  return reg;
}

}  // namespace kvasir::plugin
