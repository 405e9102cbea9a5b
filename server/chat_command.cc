// `winnow chat`: a conversation with a running server, at a terminal. What the model says goes to standard output, all
// else to standard error, so that a script may read it, too.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "server/client.h"
#include "server/commands.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

struct Flags {
  ClientOptions client;
  std::string system, policy, exactness;
  std::optional<float> temperature, top_p;
  std::optional<int32_t> max_tokens;
  std::optional<uint64_t> seed;
  CacheFlags cache;
};

constexpr std::string_view kHelp =
    "/policy TEXT   how later answers attend: dense, lsh:k=2%, ...; alone: what it is\n"
    "/exactness X   how near to dense: exact, floor:C or fast; alone: what it is\n"
    "/system TEXT   the instructions before the conversation; alone: none\n"
    "/file PATH     puts a text before the next message, as a document to ask about\n"
    "/history       the conversation so far\n"
    "/undo          forgets the last question and its answer\n"
    "/clear         forgets all of it\n"
    "/quit          ends, as the end of the input does\n"
    "Ctrl-C stops an answer; what came of it stays.\n";

// Set by Ctrl-C while an answer comes.
std::atomic<bool> interrupted = false;

// For the time of an answer; a second Ctrl-C ends the program.
class InterruptGuard {
 public:
  InterruptGuard() {
    interrupted = false;
    struct sigaction action = {};
    action.sa_handler = [](int) { interrupted = true; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &action, &before_);
  }
  ~InterruptGuard() { sigaction(SIGINT, &before_, nullptr); }

 private:
  struct sigaction before_ = {};
};

// Bytes read for an answer, and those that dense attention would have read.
std::string UsageLine(const v1::Usage& usage) {
  std::string line = absl::StrFormat(
      "[%d tokens, %d of them cached; %d generated; first token after %.2f s, all after %.2f s",
      usage.prompt_tokens(), usage.cached_tokens(), usage.generated_tokens(),
      usage.time_to_first_token_seconds(), usage.total_seconds());
  if (usage.kv_dense_bytes() > 0) {
    line += absl::StrFormat("; %s (%s) read %.1f %% of dense KV", usage.policy(), usage.exactness(),
                            100 * static_cast<double>(usage.kv_read_bytes().fast()) /
                                static_cast<double>(usage.kv_dense_bytes()));
    const uint64_t host = usage.kv_read_bytes().host(), disk = usage.kv_read_bytes().disk();
    if (host > 0) line += absl::StrFormat(", %d bytes from host memory", host);
    if (disk > 0) line += absl::StrFormat(", %d bytes from disk", disk);
  }
  if (usage.retrieval().has_coverage()) {
    line += absl::StrFormat("; coverage %.3f", usage.retrieval().coverage());
  }
  return line + "]\n";
}

class Conversation {
 public:
  Conversation(const Flags& flags, Client& client)
      : flags_(flags),
        client_(client),
        system_(flags.system),
        policy_(flags.policy),
        exactness_(flags.exactness) {}

  // False: the conversation ends.
  bool Take(const std::string& line) {
    if (line.empty()) return true;
    if (line.front() != '/') {
      Ask(line);
      return true;
    }
    const size_t space = line.find(' ');
    const std::string word = line.substr(0, space);
    const std::string rest = space == line.npos ? "" : line.substr(space + 1);
    if (word == "/quit") return false;
    if (word == "/policy") {
      SetOrShow("policy", rest, policy_);
    } else if (word == "/exactness") {
      SetOrShow("exactness", rest, exactness_);
    } else if (word == "/system") {
      system_ = rest;
    } else if (word == "/file") {
      AddFile(rest);
    } else if (word == "/history") {
      for (const v1::ChatMessage& message : turns_.messages()) {
        std::cerr << message.role() << ": " << message.content() << "\n";
      }
    } else if (word == "/undo") {
      for (int i = 0; i < 2 && turns_.messages_size() > 0; ++i) {
        turns_.mutable_messages()->RemoveLast();
      }
    } else if (word == "/clear") {
      turns_.clear_messages();
      document_.clear();
    } else {
      std::cerr << kHelp;
    }
    return true;
  }

  int exit_code() const { return exit_code_; }

 private:
  static void SetOrShow(std::string_view name, const std::string& value, std::string& setting) {
    if (!value.empty()) setting = value;
    std::cerr << name << ": " << (setting.empty() ? "the server's" : setting) << "\n";
  }

  void AddFile(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (!file.good() && !file.eof()) {
      std::cerr << path << ": cannot be read\n";
      return;
    }
    if (text.empty()) {
      std::cerr << path << ": is empty, or cannot be read\n";
      return;
    }
    document_ += text + "\n\n";
    std::cerr << "[" << text.size() << " bytes before the next message]\n";
  }

  void Ask(const std::string& question) {
    v1::GenerateRequest request;
    v1::ChatPrompt& chat = *request.mutable_chat();
    const auto add = [](v1::ChatPrompt& to, const char* role, std::string content) {
      v1::ChatMessage& message = *to.add_messages();
      message.set_role(role);
      message.set_content(std::move(content));
    };
    if (!system_.empty()) add(chat, "system", system_);
    chat.mutable_messages()->MergeFrom(turns_.messages());
    add(chat, "user", document_ + question);
    request.set_policy(policy_);
    request.set_exactness(exactness_);
    if (flags_.temperature) request.mutable_sampling()->set_temperature(*flags_.temperature);
    if (flags_.top_p) request.mutable_sampling()->set_top_p(*flags_.top_p);
    if (flags_.seed) request.mutable_sampling()->set_seed(*flags_.seed);
    *request.mutable_cache() = ToProto(flags_.cache);
    if (flags_.max_tokens) request.mutable_stopping()->set_max_tokens(*flags_.max_tokens);

    std::string answer;
    std::optional<v1::Usage> usage;
    const InterruptGuard guard;
    const CallResult result = client_.Generate(request, [&](const v1::GenerateResponse& message) {
      answer += message.text();
      std::cout << message.text() << std::flush;
      if (message.has_finish()) usage = message.finish().usage();
      return !interrupted && std::cout.good();
    });
    std::cout << std::endl;
    if (!result.ok() && !interrupted) {
      // The question is not part of the conversation: it can be asked again.
      std::cerr << "winnow chat: " << result.description << "\n";
      exit_code_ = result.exit_code();
      return;
    }
    exit_code_ = kExitOk;
    add(turns_, "user", std::exchange(document_, {}) + question);
    add(turns_, "assistant", std::move(answer));
    if (interrupted) std::cerr << "[stopped]\n";
    if (usage.has_value()) std::cerr << UsageLine(*usage);
  }

  const Flags& flags_;
  Client& client_;
  std::string system_, policy_, exactness_, document_;
  v1::ChatPrompt turns_;
  int exit_code_ = kExitOk;  // of the last answer
};

int Chat(const Flags& flags) {
  const auto client = Client::Create(flags.client);
  if (!client.ok()) {
    std::cerr << "winnow chat: " << client.status().message() << std::endl;
    return kExitUsage;
  }
  const bool terminal = isatty(STDIN_FILENO) != 0;
  if (terminal) std::cerr << "/help says what can be done.\n";
  Conversation conversation(flags, **client);
  std::string line;
  for (;;) {
    if (terminal) std::cerr << "> " << std::flush;
    if (!std::getline(std::cin, line) || !conversation.Take(line) || !std::cout) break;
  }
  return conversation.exit_code();
}

}  // namespace

void AddChatCommand(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("chat", "Talk to a running server, line by line");
  auto flags = std::make_shared<Flags>();
  AddClientFlags(*command, &flags->client);
  command->add_option("--system", flags->system, "instructions before the conversation");
  command->add_option("--policy", flags->policy,
                      "attention policy, as dense or quest:k=2%; empty: the server's");
  command->add_option(
      "--exactness", flags->exactness,
      "exact, floor:C or fast: how near to dense; empty: as the server and the policy say");
  command->add_option("--temperature", flags->temperature, "0: greedy");
  command->add_option("--top-p", flags->top_p, "in (0, 1]");
  command->add_option("--seed", flags->seed, "the same seed repeats the answers");
  command->add_option("--max-tokens", flags->max_tokens, "tokens of an answer, at most");
  AddCacheFlags(*command, &flags->cache);
  command->footer(std::string(kHelp) +
                  "Exit codes, of the last answer: 0 answered; 1 the server refused or failed; 2 "
                  "flags; 3 no server "
                  "answered; 4 the deadline passed.");
  command->callback([flags, exit_code] { *exit_code = Chat(*flags); });
}

}  // namespace winnow::server
