// `winnow bench start`: how long a server takes from exec to its first token, measured from outside,
// as whoever starts it sees it.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/cleanup/cleanup.h"
#include "bench/commands.h"
#include "bench/output.h"
#include "engine/base/status_macros.h"
#include "server/client.h"
#include "server/commands.h"
#include "server/strings.h"

extern char** environ;

namespace winnow::bench {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;

constexpr std::chrono::milliseconds kPoll(1);
constexpr std::chrono::seconds kStopGrace(10);

struct StartFlags {
  std::string model, json_path, prompt = "Hello";
  std::vector<std::string> serve_flags;
  int32_t runs = 3;
  double timeout_seconds = 600;
};

// Seconds since the child's exec was asked for.
struct StartTimes {
  double listening = 0;    // clients can connect: its port is known
  double ready = 0;        // its health service says SERVING
  double first_token = 0;  // the first token of an answer has come
};

double SecondsSince(SteadyTime start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A folder for one run's port file and log, removed with its contents.
class RunFolder {
 public:
  static absl::StatusOr<std::unique_ptr<RunFolder>> Create() {
    std::string path = (std::filesystem::temp_directory_path() / "winnow-start-XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr) return absl::ErrnoToStatus(errno, path);
    return std::unique_ptr<RunFolder>(new RunFolder(path));
  }
  ~RunFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  std::string port_file() const { return path_ + "/port"; }
  std::string log_file() const { return path_ + "/log"; }

 private:
  explicit RunFolder(std::string path) : path_(std::move(path)) {}
  const std::string path_;
};

// The last lines that the server wrote, for an error.
std::string LogTail(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  std::string tail;
  constexpr size_t kLines = 5;
  for (size_t i = lines.size() > kLines ? lines.size() - kLines : 0; i < lines.size(); ++i) {
    server::Append(tail, "\n  ", lines[i]);
  }
  return tail;
}

// `winnow serve` as a child process; ended when this goes.
class ServerProcess {
 public:
  // The program is this one, started afresh.
  static absl::StatusOr<std::unique_ptr<ServerProcess>> Start(const StartFlags& flags,
                                                              const RunFolder& folder) {
    std::vector<std::string> words = {"winnow",    "serve",       "--model",     flags.model,
                                      "--listen",  "127.0.0.1:0", "--port-file", folder.port_file(),
                                      "--metrics", "off"};
    words.insert(words.end(), flags.serve_flags.begin(), flags.serve_flags.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    const absl::Cleanup destroy = [&actions] { posix_spawn_file_actions_destroy(&actions); };
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, folder.log_file().c_str(),
                                     O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    std::unique_ptr<ServerProcess> process(new ServerProcess(folder.log_file()));
    process->start_ = std::chrono::steady_clock::now();
    const int error =
        posix_spawn(&process->pid_, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
    if (error != 0) {
      process->pid_ = -1;
      return absl::ErrnoToStatus(error, "starting the server");
    }
    return process;
  }

  ~ServerProcess() {
    if (pid_ < 0) return;
    kill(pid_, SIGTERM);
    const SteadyTime begin = std::chrono::steady_clock::now();
    while (waitpid(pid_, nullptr, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() - begin > kStopGrace) kill(pid_, SIGKILL);
      std::this_thread::sleep_for(kPoll);
    }
  }

  SteadyTime start() const { return start_; }

  // Waits until `done` says so. Aborted, with the end of the log: the server has exited, or takes
  // longer than `timeout_seconds` from its start.
  template <typename Done>
  absl::Status WaitFor(const char* what, double timeout_seconds, Done done) {
    while (!done()) {
      int exit_status = 0;
      if (waitpid(pid_, &exit_status, WNOHANG) == pid_) {
        pid_ = -1;
        const std::string how = WIFEXITED(exit_status)
                                    ? server::Concat("exit code ", WEXITSTATUS(exit_status))
                                    : server::Concat("signal ", WTERMSIG(exit_status));
        return absl::AbortedError(server::Concat("the server ended with ", how, " before it was ",
                                                 what, ":", LogTail(log_file_)));
      }
      if (SecondsSince(start_) > timeout_seconds) {
        return absl::AbortedError(server::Concat("the server is not ", what, " after ",
                                                 timeout_seconds, " seconds:", LogTail(log_file_)));
      }
      std::this_thread::sleep_for(kPoll);
    }
    return absl::OkStatus();
  }

 private:
  explicit ServerProcess(std::string log_file) : log_file_(std::move(log_file)) {}
  const std::string log_file_;
  pid_t pid_ = -1;
  SteadyTime start_;
};

absl::StatusOr<StartTimes> RunStart(const StartFlags& flags) {
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<RunFolder> folder, RunFolder::Create());
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<ServerProcess> server,
                          ServerProcess::Start(flags, *folder));
  StartTimes times;
  int port = 0;
  WINNOW_RETURN_IF_ERROR(server->WaitFor("listening", flags.timeout_seconds, [&] {
    std::ifstream file(folder->port_file());
    return static_cast<bool>(file >> port);
  }));
  times.listening = SecondsSince(server->start());
  server::ClientOptions options;
  options.server = server::Concat("127.0.0.1:", port);
  options.timeout = absl::Seconds(flags.timeout_seconds);
  WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<server::Client> client,
                          server::Client::Create(options));
  WINNOW_RETURN_IF_ERROR(server->WaitFor("ready", flags.timeout_seconds, [&] {
    bool serving = false;
    return client->CheckHealth("", &serving).ok() && serving;
  }));
  times.ready = SecondsSince(server->start());

  v1::GenerateRequest request;
  request.mutable_text()->set_text(flags.prompt);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(1);
  request.mutable_stopping()->set_ignore_eos(true);
  const server::CallResult result = client->Generate(request, [&](const v1::GenerateResponse&) {
    if (times.first_token == 0) times.first_token = SecondsSince(server->start());
    return true;
  });
  if (!result.ok())
    return absl::AbortedError(server::Concat("the request failed: ", result.description));
  if (times.first_token == 0) return absl::AbortedError("the answer was empty");
  return times;
}

int BenchStart(const StartFlags& flags) {
  FILE* const table = TableFile(flags.json_path);
  std::fprintf(table, "%4s %18s %14s %20s\n", "run", "exec->listening s", "exec->ready s",
               "exec->first token s");
  Json json = {{"start", Json::array()},
               {"run", {{"model", flags.model}, {"serve_flags", flags.serve_flags}}}};
  std::vector<double> first_tokens;
  for (int32_t run = 0; run < flags.runs; ++run) {
    const absl::StatusOr<StartTimes> times = RunStart(flags);
    if (!times.ok()) return server::ReportFailure("bench", times.status());
    std::fprintf(table, "%4d %18.3f %14.3f %20.3f\n", run + 1, times->listening, times->ready,
                 times->first_token);
    std::fflush(table);
    first_tokens.push_back(times->first_token);
    json["start"].push_back({{"listening_s", Round(times->listening)},
                             {"ready_s", Round(times->ready)},
                             {"first_token_s", Round(times->first_token)}});
  }
  std::sort(first_tokens.begin(), first_tokens.end());
  const double median = first_tokens[first_tokens.size() / 2];
  std::fprintf(table, "exec to first token: %.3f s (median of %d)\n", median, flags.runs);
  json["first_token_s_median"] = Round(median);
  return FinishBench(flags.json_path, json);
}

}  // namespace

void AddStartBench(CLI::App& bench, int* exit_code) {
  auto flags = std::make_shared<StartFlags>();
  CLI::App* start = bench.add_subcommand(
      "start", "A server from exec to its first token, as whoever starts it sees it");
  start->add_option("--model", flags->model, "What the server loads")->required();
  start->add_option("--runs", flags->runs, "Servers that are started, one after the other")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  start->add_option("--prompt", flags->prompt, "Of the one request")->capture_default_str();
  start->add_option("--timeout", flags->timeout_seconds, "Of a server, in seconds")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
  start->add_option("serve_flags", flags->serve_flags, "After --: more flags of winnow serve");
  start->add_option("--json", flags->json_path, "Also write the results here; - is stdout")
      ->check(server::WrongOutputFile)
      ->type_name("OUT");
  start->callback([flags, exit_code] { *exit_code = BenchStart(*flags); });
}

}  // namespace winnow::bench
