#include "server/harmony_chat.h"

#include <string>
#include <utility>
#include <vector>

#include "server/strings.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

bool IsSystem(const OrderedJson& message) {
  return message["role"] == "system" || message["role"] == "developer";
}

std::string TextOf(const OrderedJson& message, const char* name) {
  const auto found = message.find(name);
  return found != message.end() && found->is_string() ? found->get<std::string>() : "";
}

std::string Paragraphs(const std::string& first, const std::string& second) {
  if (first.empty() || second.empty()) return first + second;
  return Concat(first, "\n\n", second);
}

// The assistant's message `turn`, which has calls, as one message for each call. `results`: the tools' messages that
// follow it.
void AddCalls(OrderedJson turn, std::vector<OrderedJson> results, OrderedJson& out) {
  const std::string thought =
      Paragraphs(TextOf(turn, "reasoning_content"), TextOf(turn, "content"));
  const OrderedJson calls = std::move(turn["tool_calls"]);
  // Results by call: those that name it, then those that name none of the calls, in order.
  std::vector<std::vector<OrderedJson>> of_call(calls.size());
  std::vector<OrderedJson> others;
  for (OrderedJson& result : results) {
    size_t i = 0;
    while (i < calls.size() && TextOf(calls[i], "id") != TextOf(result, "tool_call_id")) ++i;
    (i < calls.size() && of_call[i].empty() ? of_call[i] : others).push_back(std::move(result));
  }
  auto other = others.begin();
  for (size_t i = 0; i < calls.size(); ++i) {
    OrderedJson message = {{"role", "assistant"}, {"content", ""}};
    if (i == 0 && !thought.empty()) message["reasoning_content"] = thought;
    message["tool_calls"] = OrderedJson::array({calls[i]});
    out.push_back(std::move(message));
    if (of_call[i].empty() && other != others.end()) of_call[i].push_back(std::move(*other++));
    for (OrderedJson& result : of_call[i]) out.push_back(std::move(result));
  }
  for (; other != others.end(); ++other) out.push_back(std::move(*other));
}

// The template writes such a default behind a text, and fails on what is none.
void FitDefault(OrderedJson& parameter) {
  if (!parameter.is_object() || !parameter.contains("default")) return;
  OrderedJson& value = parameter["default"];
  const bool is_joined = parameter.contains("enum") || parameter.contains("oneOf");
  if (is_joined && !value.is_string()) value = value.dump();
}

}  // namespace

bool WritesHarmony(const engine::ChatTemplate& chat_template) {
  return chat_template.Mentions("<|start|>") && chat_template.Mentions("<|channel|>") &&
         chat_template.Mentions("<|message|>");
}

OrderedJson FitHarmonyMessages(OrderedJson messages) {
  OrderedJson out = OrderedJson::array();
  for (size_t i = 0; i < messages.size(); ++i) {
    OrderedJson& message = messages[i];
    if (IsSystem(message)) {
      if (out.empty()) {
        out.push_back(std::move(message));
      } else if (out.size() == 1 && IsSystem(out[0])) {
        out[0]["content"] = Paragraphs(TextOf(out[0], "content"), TextOf(message, "content"));
      } else {
        message["role"] = "user";
        out.push_back(std::move(message));
      }
      continue;
    }
    const bool calls = message["role"] == "assistant" && message.contains("tool_calls") &&
                       message["tool_calls"].is_array() && !message["tool_calls"].empty();
    if (!calls) {
      out.push_back(std::move(message));
      continue;
    }
    std::vector<OrderedJson> results;
    OrderedJson turn = std::move(message);
    while (i + 1 < messages.size() && messages[i + 1]["role"] == "tool") {
      results.push_back(std::move(messages[++i]));
    }
    AddCalls(std::move(turn), std::move(results), out);
  }
  return out;
}

OrderedJson FitHarmonyTools(OrderedJson tools) {
  for (OrderedJson& tool : tools) {
    const auto function = tool.find("function");
    if (function == tool.end() || !function->is_object()) continue;
    if (TextOf(*function, "description").empty()) (*function)["description"] = "";
    const auto parameters = function->find("parameters");
    if (parameters == function->end() || !parameters->is_object()) continue;
    const auto properties = parameters->find("properties");
    if (properties == parameters->end() || !properties->is_object()) continue;
    for (auto& [name, parameter] : properties->items()) FitDefault(parameter);
  }
  return tools;
}

}  // namespace winnow::server
