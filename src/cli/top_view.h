// Draws what `kvasir top` knows.
#pragma once

#include <ftxui/dom/elements.hpp>
#include <string>

#include "cli/top_state.h"

namespace kvasir::cli {

// Fits `columns` x `rows` characters; `link` says how the line to the hub is.
ftxui::Element draw_top(const TopState& state, const std::string& hub, const std::string& link, int columns, int rows);

}  // namespace kvasir::cli
