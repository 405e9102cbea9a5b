// `winnow tokenize`: what its lines mean stands in the header.
#include "server/tokenize_command.h"

#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/time/civil_time.h"
#include "engine/base/status_macros.h"
#include "engine/model_text.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"
#include "server/commands.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

using json = nlohmann::ordered_json;  // templates print tools as they came

absl::Status CheckKeys(const json& line, std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : line.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return absl::InvalidArgumentError(Concat("unknown key \"", key, "\""));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> BoolOr(const json& line, const char* key, bool fallback) {
  auto it = line.find(key);
  if (it == line.end()) return fallback;
  if (it->is_boolean()) return it->get<bool>();
  return absl::InvalidArgumentError(Concat("\"", key, "\" must be true or false"));
}

absl::StatusOr<std::string> StringOf(const json& object, const char* key) {
  auto it = object.find(key);
  if (it != object.end() && it->is_string()) return it->get<std::string>();
  return absl::InvalidArgumentError(Concat("\"", key, "\" must be a string"));
}

class Answerer {
 public:
  Answerer(const engine::Tokenizer& tokenizer, const engine::ChatTemplate& chat)
      : tokenizer_(tokenizer), chat_(chat) {}

  absl::StatusOr<json> Answer(const std::string& text) const {
    const json line = json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (line.is_discarded()) return absl::InvalidArgumentError("not JSON in UTF-8");
    if (!line.is_object()) return absl::InvalidArgumentError("not a JSON object");
    if (line.contains("text")) return Encode(line);
    if (line.contains("ids")) return Decode(line);
    if (line.contains("messages")) return Chat(line);
    return absl::InvalidArgumentError("needs \"text\", \"ids\" or \"messages\"");
  }

 private:
  absl::StatusOr<json> Encode(const json& line) const {
    WINNOW_RETURN_IF_ERROR(CheckKeys(line, {"text", "add_special_tokens", "parse_special"}));
    WINNOW_ASSIGN_OR_RETURN(const std::string text, StringOf(line, "text"));
    WINNOW_ASSIGN_OR_RETURN(const bool add_special, BoolOr(line, "add_special_tokens", true));
    WINNOW_ASSIGN_OR_RETURN(const bool parse_special, BoolOr(line, "parse_special", true));
    WINNOW_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                            tokenizer_.Encode(text, add_special, parse_special));
    return json{{"ids", ids}};
  }

  absl::StatusOr<json> Decode(const json& line) const {
    WINNOW_RETURN_IF_ERROR(CheckKeys(line, {"ids", "skip_special_tokens"}));
    WINNOW_ASSIGN_OR_RETURN(const bool skip, BoolOr(line, "skip_special_tokens", false));
    const json& list = line["ids"];
    if (!list.is_array()) return absl::InvalidArgumentError("\"ids\" must be an array");
    std::vector<int32_t> ids;
    ids.reserve(list.size());
    for (const json& id : list) {
      if (!id.is_number_unsigned() || id.get<uint64_t>() > INT32_MAX) {
        return absl::InvalidArgumentError(
            Concat("ids[", ids.size(), "] must be an integer from 0 to ", INT32_MAX));
      }
      ids.push_back(id.get<int32_t>());
    }
    return json{{"text", tokenizer_.Decode(ids, skip)}};
  }

  absl::StatusOr<json> Chat(const json& line) const {
    WINNOW_RETURN_IF_ERROR(
        CheckKeys(line, {"messages", "tools", "documents", "chat_template_kwargs",
                         "add_generation_prompt", "now", "segments"}));
    engine::ChatRequest request;
    WINNOW_ASSIGN_OR_RETURN(request.add_generation_prompt,
                            BoolOr(line, "add_generation_prompt", true));
    WINNOW_ASSIGN_OR_RETURN(const bool segments, BoolOr(line, "segments", false));
    const auto part = [&line](const char* key) {
      const auto found = line.find(key);
      return found == line.end() ? nullptr : &*found;
    };
    request.messages = part("messages");
    request.tools = part("tools");
    request.documents = part("documents");
    request.kwargs = part("chat_template_kwargs");
    if (line.contains("now")) {
      WINNOW_ASSIGN_OR_RETURN(const std::string text, StringOf(line, "now"));
      absl::CivilSecond now;
      if (!absl::ParseCivilTime(text, &now)) {
        return absl::InvalidArgumentError("\"now\" must be a time like 2025-02-01T12:30:00");
      }
      request.now = now;
    }
    WINNOW_ASSIGN_OR_RETURN(const engine::ChatTemplate::Rendered rendered, chat_.Render(request));
    WINNOW_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                            tokenizer_.Encode(rendered.Segments(), /*add_special_tokens=*/false));
    json answer{{"text", rendered.text}, {"ids", ids}};
    if (segments) answer["segments"] = rendered.segments;
    return answer;
  }

  const engine::Tokenizer& tokenizer_;
  const engine::ChatTemplate& chat_;
};

int Tokenize(const std::string& model_path) {
  const auto tokenizer = engine::LoadTokenizer(model_path);
  const auto chat = engine::LoadChatTemplate(model_path);
  for (const absl::Status& status : {tokenizer.status(), chat.status()}) {
    if (status.ok()) continue;
    std::fprintf(stderr, "winnow tokenize: %s\n", std::string(status.message()).c_str());
    return kExitModel;
  }
  std::ios::sync_with_stdio(false);
  const bool all_answered = TokenizeLines(**tokenizer, *chat, std::cin, std::cout);
  if (!std::cout) {
    std::fprintf(stderr, "winnow tokenize: the answers cannot be written\n");
    return kExitFailure;
  }
  return all_answered ? kExitOk : kExitFailure;
}

}  // namespace

bool TokenizeLines(const engine::Tokenizer& tokenizer, const engine::ChatTemplate& chat,
                   std::istream& in, std::ostream& out) {
  const Answerer answerer(tokenizer, chat);
  bool all_answered = true;
  for (std::string line; std::getline(in, line);) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const absl::StatusOr<json> answer = answerer.Answer(line);
    if (answer.ok()) {
      out << *answer << '\n';
    } else {
      out << json{{"error", std::string(answer.status().message())}} << '\n';
      all_answered = false;
    }
    // Someone may be talking to us line by line.
    if (in.rdbuf()->in_avail() <= 0) out.flush();
  }
  out.flush();
  return all_answered;
}

void AddTokenizeCommand(CLI::App& app, int* exit_code) {
  auto model_path = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(
      "tokenize", "Turn text into token ids and back, as JSON lines on stdin and stdout");
  command
      ->add_option("--model", *model_path,
                   "Model directory (its tokenizer.json is used) or GGUF file")
      ->required()
      ->type_name("DIR|FILE.gguf");
  command->callback([model_path, exit_code] { *exit_code = Tokenize(*model_path); });
}

}  // namespace winnow::server
