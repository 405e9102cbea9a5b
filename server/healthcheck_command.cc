// `winnow healthcheck`: for probes and scripts.
#include <iostream>
#include <memory>

#include "CLI/CLI.hpp"
#include "server/client.h"
#include "server/commands.h"

namespace winnow::server {
namespace {

struct Flags {
  ClientOptions client;
  std::string service;
};

int Check(const Flags& flags) {
  auto client = Client::Create(flags.client);
  if (!client.ok()) {
    std::cerr << "winnow healthcheck: " << client.status().message() << std::endl;
    return kExitUsage;
  }
  bool serving = false;
  const CallResult result = (*client)->CheckHealth(flags.service, &serving);
  if (!result.ok()) {
    std::cerr << "winnow healthcheck: " << result.description << std::endl;
    return result.exit_code();
  }
  std::cout << (serving ? "SERVING" : "NOT_SERVING") << std::endl;
  return serving ? kExitOk : kExitFailure;
}

}  // namespace

void AddHealthcheckCommand(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("healthcheck", "Ask a server whether it serves");
  auto flags = std::make_shared<Flags>();
  flags->client.timeout = absl::Seconds(10);
  AddClientFlags(*command, &flags->client);
  command->add_option("--service", flags->service,
                      "health service name; empty: the server as a whole");
  command->footer(
      "Exit codes: 0 SERVING; 1 not serving, or no such service; 2 flags; 3 no server answered; 4 "
      "it "
      "did not answer within --timeout (default 10s).");
  command->callback([flags, exit_code] { *exit_code = Check(*flags); });
}

}  // namespace winnow::server
