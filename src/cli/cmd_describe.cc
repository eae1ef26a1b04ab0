// kvasir describe: the whole command line as JSON. Manual pages and shell completions are made
// from it (packaging/command_docs.py), so they cannot name an option that is not there.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/console.h"

namespace kvasir::cli {
namespace {

using nlohmann::ordered_json;

// "UINT:SIZE [b, kb(=1024b), ...]" -> "UINT:SIZE", "INT:INT in [1 - 512]" stays.
std::string type_of(const CLI::Option& option) {
  if (option.get_items_expected_max() == 0) return "";  // a flag
  const std::string type = option.get_type_name();
  return type.contains(":SIZE [") ? "SIZE" : type;
}

ordered_json describe(const CLI::Option& option) {
  ordered_json names = ordered_json::array();
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  return {{"names", names},
          {"positional", option.get_positional() ? option.get_name(true) : ""},
          {"type", type_of(option)},
          {"required", option.get_required()},
          {"many", option.get_items_expected_max() > 1},
          {"default", option.get_default_str()},
          {"help", option.get_description()}};
}

ordered_json describe(const CLI::App& app) {
  ordered_json options = ordered_json::array(), commands = ordered_json::array();
  for (const CLI::Option* option : app.get_options())
    if (option->get_positional() || !option->get_group().empty()) options.push_back(describe(*option));
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    if (!command->get_group().empty()) commands.push_back(describe(*command));
  return {{"name", app.get_name()}, {"help", app.get_description()}, {"options", options},
          {"commands", commands}, {"command_required", app.get_require_subcommand_min() > 0}};
}

}  // namespace

void add_describe(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("describe", "Print the command line as JSON");
  command->group("");  // not listed: for the build
  command->callback([&app, &exit_code] {
    ordered_json root = describe(app);
    root["name"] = "kvasir";
    root["version"] = KVASIR_VERSION;
    std::printf("%s\n", root.dump(1).c_str());
    exit_code = kExitOk;
  });
}

}  // namespace kvasir::cli
