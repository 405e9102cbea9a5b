#include "engine/text/chat_template.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_format.h"
#include "engine/concat.h"
#include "engine/json_file.h"
#include "engine/status_macros.h"
#include "engine/text/chat_format.h"
#include "engine/text/tokenizer_json.h"

namespace winnow::engine {
namespace {

constexpr size_t kTemplateBytesMax = 1 << 20;

// Known templates by FNV-1a and size of their canonical text. Families publish several texts that
// render the same, and each text both with line breaks and with \n inside its strings.
struct KnownTemplate {
  uint64_t fingerprint;
  size_t bytes;
  ChatFormat format;
};
constexpr KnownTemplate kKnownTemplates[] = {
    {0x53B3424EE3A60AD6, 189, ChatFormat::kNeedle},
    {0x88BF4138D5C826F0, 196, ChatFormat::kChatMl},
    {0xA41D6BAE9B9141BC, 199, ChatFormat::kChatMl},
    {0xF344EECF1BD3A427, 815, ChatFormat::kLlama2},
    {0x3E8B632DF301BF05, 814, ChatFormat::kLlama2},
    {0x0E60067A5537498E, 389, ChatFormat::kLlama3},
    {0x32844FD43EAB01D2, 393, ChatFormat::kLlama3},
    {0x74891E390E614AE2, 348, ChatFormat::kLlama3AlwaysPrompts},
    {0x60B6F54CAAFC7E66, 352, ChatFormat::kLlama3AlwaysPrompts},
    {0xB4EBE37A3362AB30, 3945, ChatFormat::kLlama31},
    {0xCB7A5815F322A0B0, 3382, ChatFormat::kLlama32},
    {0xC730ACC029CE6EE0, 477, ChatFormat::kMistralV01},
    {0x8C734B90B4F8D84D, 470, ChatFormat::kMistralV02},
    {0x81856AF38746323E, 477, ChatFormat::kMistralV02Spaced},
    {0x51A7257BE7DDAE05, 926, ChatFormat::kMistralV02System},
    {0x748851AF5BE49077, 3056, ChatFormat::kMistralV03},
    {0x676AECD60792E6D5, 2983, ChatFormat::kMistralV03Verbatim},
    {0x9AB6555A498BEDBD, 2988, ChatFormat::kMistralV03},
    {0x7CB4F0C0ECA2C197, 3042, ChatFormat::kMistralNemo},
    {0x06AB233DDB0D3B5C, 2972, ChatFormat::kMistralNemo},
    {0x893E758F2B86D461, 443, ChatFormat::kQwen15},
    {0x8A87094E0E1E24C5, 328, ChatFormat::kQwen2},
    {0x75E88977B2787CD7, 333, ChatFormat::kQwen2},
    {0x50BFC7B120E94645, 2093, ChatFormat::kQwen25},
    {0xBAEACCA2E236DCBD, 2013, ChatFormat::kQwen25Base},
    {0x8B7DFC701546FB1E, 3296, ChatFormat::kQwen3},
    {0x049CD3D51562E165, 448, ChatFormat::kQwen15},
};

bool IsJinjaSpace(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

// The text without what Jinja drops anyway: one line break at the end, and white space before a tag
// that begins with a minus sign.
std::string Canonical(std::string_view text) {
  if (text.ends_with('\n')) text.remove_suffix(1);
  std::string out;
  for (size_t at = 0; at < text.size(); ++at) {
    const bool tag = text[at] == '{' && at + 2 < text.size() &&
                     (text[at + 1] == '%' || text[at + 1] == '{' || text[at + 1] == '#');
    if (tag && text[at + 2] == '-') {
      while (!out.empty() && IsJinjaSpace(out.back())) out.pop_back();
    }
    out += text[at];
  }
  return out;
}

uint64_t Fnv1a(std::string_view text) {
  uint64_t hash = 0xCBF29CE484222325;
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

// A token of tokenizer_config.json: a string, or an object with its content.
absl::StatusOr<std::string> ReadToken(const JsonNode& config, const std::string& name) {
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> node, config.Optional(name));
  if (!node) return std::string();
  if (!node->value().is_object()) return node->String();
  WINNOW_ASSIGN_OR_RETURN(const JsonNode content, node->Member("content"));
  return content.String();
}

// "chat_template": a string, or a list of {"name", "template"} of which "default" counts.
absl::StatusOr<std::optional<std::string>> ReadTemplate(const JsonNode& config) {
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> node, config.Optional("chat_template"));
  if (!node) return std::optional<std::string>();
  if (!node->value().is_array()) {
    WINNOW_ASSIGN_OR_RETURN(std::string text, node->String());
    return std::optional<std::string>(std::move(text));
  }
  for (size_t i = 0; i < node->size(); ++i) {
    const JsonNode entry = node->At(i);
    WINNOW_ASSIGN_OR_RETURN(const JsonNode name_node, entry.Member("name"));
    WINNOW_ASSIGN_OR_RETURN(const std::string name, name_node.String());
    if (name != "default") continue;
    WINNOW_ASSIGN_OR_RETURN(const JsonNode text_node, entry.Member("template"));
    WINNOW_ASSIGN_OR_RETURN(std::string text, text_node.String());
    return std::optional<std::string>(std::move(text));
  }
  return std::optional<std::string>();
}

bool NeedsBos(ChatFormat format) {
  // Others print it where there is one, or not at all.
  return format == ChatFormat::kLlama2 || format == ChatFormat::kLlama3 ||
         format == ChatFormat::kLlama3AlwaysPrompts;
}

bool NeedsEos(ChatFormat format) {
  switch (format) {
    case ChatFormat::kLlama2:
    case ChatFormat::kMistralV01:
    case ChatFormat::kMistralV02:
    case ChatFormat::kMistralV02Spaced:
    case ChatFormat::kMistralV02System:
    case ChatFormat::kMistralV03:
    case ChatFormat::kMistralV03Verbatim:
    case ChatFormat::kMistralNemo:
      return true;
    default:
      return false;
  }
}

}  // namespace

ChatTemplate ChatTemplate::FromText(std::string_view text, std::string bos_token,
                                    std::string eos_token) {
  ChatTemplate chat;
  chat.has_text_ = true;
  chat.bos_token_ = std::move(bos_token);
  chat.eos_token_ = std::move(eos_token);
  const std::string canonical = Canonical(text);
  chat.fingerprint_ = Fnv1a(canonical);
  for (const KnownTemplate& known : kKnownTemplates) {
    if (known.fingerprint == chat.fingerprint_ && known.bytes == canonical.size()) {
      chat.format_ = known.format;
    }
  }
  return chat;
}

absl::StatusOr<ChatTemplate> ChatTemplate::Load(const std::string& model_dir) {
  std::optional<std::string> text;
  std::string bos_token;
  std::string eos_token;
  const absl::StatusOr<JsonDocument> config =
      JsonDocument::ReadFile(model_dir + "/tokenizer_config.json");
  if (config.ok()) {
    WINNOW_ASSIGN_OR_RETURN(bos_token, ReadToken(config->root(), "bos_token"));
    WINNOW_ASSIGN_OR_RETURN(eos_token, ReadToken(config->root(), "eos_token"));
    WINNOW_ASSIGN_OR_RETURN(text, ReadTemplate(config->root()));
  } else if (config.status().code() != absl::StatusCode::kNotFound) {
    return config.status();
  }
  // The newer place, which goes before the older one.
  absl::StatusOr<std::string> file =
      ReadSmallFile(model_dir + "/chat_template.jinja", kTemplateBytesMax);
  if (file.ok()) {
    text = *std::move(file);
  } else if (file.status().code() != absl::StatusCode::kNotFound) {
    return file.status();
  }
  if (!text) return ChatTemplate();
  return FromText(*text, std::move(bos_token), std::move(eos_token));
}

absl::StatusOr<ChatTemplate::Rendered> ChatTemplate::Render(std::span<const ChatMessage> messages,
                                                            bool add_generation_prompt,
                                                            std::string_view date) const {
  if (!has_text_) {
    return absl::FailedPreconditionError("the model directory has no chat template");
  }
  if (format_ == ChatFormat::kUnknown) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the model's chat template is not one that winnow knows (fingerprint %016x)",
        fingerprint_));
  }
  if (NeedsBos(format_) && bos_token_.empty()) {
    return absl::FailedPreconditionError(
        "the chat template needs a bos_token in tokenizer_config.json");
  }
  if (NeedsEos(format_) && eos_token_.empty()) {
    return absl::FailedPreconditionError(
        "the chat template needs an eos_token in tokenizer_config.json");
  }
  if (messages.empty()) return absl::InvalidArgumentError("messages: must not be empty");
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    if (role != "system" && role != "user" && role != "assistant") {
      return absl::InvalidArgumentError(
          Concat("messages[", i, "].role: must be system, user or assistant"));
    }
  }
  PromptBuilder builder;
  const ChatContext chat{messages, add_generation_prompt, date, bos_token_, eos_token_};
  WINNOW_RETURN_IF_ERROR(RenderChat(format_, chat, &builder));
  return builder.Take();
}

std::vector<TextSegment> ChatTemplate::Rendered::Segments() const {
  std::vector<TextSegment> out;
  out.reserve(segments.size());
  size_t at = 0;
  for (const auto& [length, parse_special] : segments) {
    out.push_back({std::string_view(text).substr(at, length), parse_special});
    at += length;
  }
  return out;
}

std::string_view ChatTemplate::name() const {
  switch (format_) {
    case ChatFormat::kUnknown:
      return "";
    case ChatFormat::kNeedle:
      return "needle";
    case ChatFormat::kChatMl:
      return "chatml";
    case ChatFormat::kLlama2:
      return "llama2";
    case ChatFormat::kLlama3:
    case ChatFormat::kLlama3AlwaysPrompts:
      return "llama3";
    case ChatFormat::kLlama31:
      return "llama3.1";
    case ChatFormat::kLlama32:
      return "llama3.2";
    case ChatFormat::kMistralV01:
      return "mistral-v0.1";
    case ChatFormat::kMistralV02:
    case ChatFormat::kMistralV02Spaced:
    case ChatFormat::kMistralV02System:
      return "mistral-v0.2";
    case ChatFormat::kMistralV03:
    case ChatFormat::kMistralV03Verbatim:
      return "mistral-v0.3";
    case ChatFormat::kMistralNemo:
      return "mistral-nemo";
    case ChatFormat::kQwen15:
      return "qwen1.5";
    case ChatFormat::kQwen2:
      return "qwen2";
    case ChatFormat::kQwen25:
    case ChatFormat::kQwen25Base:
      return "qwen2.5";
    case ChatFormat::kQwen3:
      return "qwen3";
  }
  return "";
}

bool ChatTemplate::wants_date() const { return format_ == ChatFormat::kLlama32; }

}  // namespace winnow::engine
