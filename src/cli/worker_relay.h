// The relay flags of kvasir worker.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "net/tls_identity.h"
#include "worker/relay_listener.h"

namespace CLI {
class App;
}

namespace kvasir::cli {

struct WorkerRelay {
  std::string url, name, ca_file, token_file;
  bool plain = false;
  bool asked() const { return !url.empty(); }
};

void add_relay_flags(CLI::App& command, WorkerRelay& relay);

// Fills in the name: the machine's and the beginning of its fingerprint, the same at each start.
Status prepare_relay(WorkerRelay& relay, const net::TlsIdentity& identity);
// "relay:NAME", to be followed by "#fingerprint".
std::string relay_address(const WorkerRelay& relay);

Result<std::unique_ptr<worker::RelayListener>> listen_at_relay(
    const WorkerRelay& relay, const net::TlsIdentity& identity,
    std::function<void(std::unique_ptr<net::Stream>, std::string)> accept);

}  // namespace kvasir::cli
