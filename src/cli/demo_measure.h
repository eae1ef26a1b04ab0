// kvasir demo --measure: figures that are printed and judged by people, never by tests.
#pragma once

#include <boost/asio/io_context.hpp>
#include <filesystem>

#include "base/error.h"
#include "cli/demo_run.h"

namespace kvasir::cli {

// Decode speed with OpenMP's two ways to wait, and how long the first token takes that needs
// the local replica, cold and warm.
Status measure(boost::asio::io_context& io, const std::filesystem::path& model, const std::filesystem::path& folder,
               const DemoRunOptions& options);

}  // namespace kvasir::cli
