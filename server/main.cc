// One program, many commands. This file only chooses; `serve` is wired together in
// server/serve_command.cc.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/commands.h"
#include "server/commands.h"
#include "server/finish.h"
#include "server/suggest.h"
#include "server/version.h"

namespace {

// What CLI11 says about an argument that it does not know is only that there is one: name it, and
// the flag that was probably meant.
std::string ExplainExtras(const CLI::App* command) {
  std::vector<std::string> known;
  for (const CLI::Option* option : command->get_options()) {
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  }
  for (const CLI::App* sub : command->get_subcommands([](const CLI::App*) { return true; })) {
    if (!sub->get_name().empty()) known.push_back(sub->get_name());  // option groups have none
  }
  for (const std::string& argument : command->remaining()) {
    const std::string name = argument.substr(0, argument.find('='));
    return "unknown argument " + name + winnow::server::DidYouMean(name, known);
  }
  return "unknown argument";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("winnow: serves language models with long contexts over gRPC", "winnow");
  app.require_subcommand(1);
  app.set_version_flag("--version", winnow::server::kVersion);

  int exit_code = winnow::server::kExitOk;
  winnow::server::AddServeCommand(app, &exit_code);
  winnow::server::AddGenerateCommand(app, &exit_code);
  winnow::server::AddChatCommand(app, &exit_code);
  winnow::server::AddHealthcheckCommand(app, &exit_code);
  winnow::server::AddTokenizeCommand(app, &exit_code);
  winnow::bench::AddEvalCommand(app, &exit_code);
  winnow::bench::AddBenchCommand(app, &exit_code);
  winnow::bench::AddMakeModelCommand(app, &exit_code);
  winnow::bench::AddPlanCommand(app, &exit_code);
  winnow::server::AddStoreCommand(app, &exit_code);
  winnow::server::AddGrammarWorkerCommand(app, &exit_code);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help, --version
      app.exit(error);
      return winnow::server::Finish(winnow::server::kExitOk);
    }
    const CLI::App* command = &app;
    while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
    // A mistyped command is reported as a missing one.
    const bool extras =
        dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ||
        (command->get_require_subcommand_min() > 0 && !command->remaining().empty());
    std::fprintf(stderr, "winnow: %s\nTry: winnow %s--help\n",
                 extras ? ExplainExtras(command).c_str() : error.what(),
                 app.get_subcommands().empty()
                     ? ""
                     : (app.get_subcommands().front()->get_name() + " ").c_str());
    return winnow::server::kExitUsage;
  } catch (const std::exception& error) {
    // Libraries below throw only where they cannot allocate or were misused.
    std::fprintf(stderr, "winnow: %s\n", error.what());
    return winnow::server::Finish(winnow::server::kExitFailure);
  }
  return winnow::server::Finish(exit_code);
}
