#include "server/http/structured_request.h"

#include <utility>
#include <vector>

#include "server/http/openai_answer.h"
#include "server/ordered_json.h"
#include "server/strings.h"
#include "server/utf8.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

// A schema as an object, true or false, or as a text of one.
bool TakeSchema(const OrderedJson& schema, std::string* out) {
  if (schema.is_string()) {
    *out = schema.get<std::string>();
    return true;
  }
  *out = Dump(schema);
  return schema.is_object() || schema.is_boolean();
}

// The constraint that is taken; a second one is a contradiction.
class Taker {
 public:
  Taker(JsonFields& fields, v1::GenerateRequest& out) : fields_(fields), out_(out) {}

  // Null: `field` is the second.
  v1::StructuredOutput* New(const std::string& field) {
    if (!taken_.empty()) {
      fields_.Add(field, Concat("contradicts ", taken_));
      return nullptr;
    }
    taken_ = field;
    return out_.mutable_structured_output();
  }

  void Text(const std::string& field, const OrderedJson& value,
            void (*set)(v1::StructuredOutput&, std::string)) {
    if (!value.is_string()) {
      fields_.Add(field, "must be a string");
    } else if (v1::StructuredOutput* const out = New(field)) {
      set(*out, value.get<std::string>());
    }
  }

  void Schema(const std::string& field, const OrderedJson& value, bool open) {
    std::string schema;
    if (!TakeSchema(value, &schema)) {
      fields_.Add(field, "must be a JSON schema");
    } else if (v1::StructuredOutput* const out = New(field)) {
      out->set_json_schema(std::move(schema));
      out->set_open(open);
    }
  }

  void Choice(const std::string& field, const OrderedJson& value) {
    bool good = value.is_array() && !value.empty();
    for (const OrderedJson& text : value) good = good && text.is_string();
    if (!good) {
      fields_.Add(field, "must be a list of strings");
    } else if (v1::StructuredOutput* const out = New(field)) {
      for (const OrderedJson& text : value)
        out->mutable_choice()->add_texts(text.get<std::string>());
    }
  }

  void Regex(const std::string& field, const OrderedJson& value) {
    Text(field, value,
         [](v1::StructuredOutput& out, std::string text) { out.set_regex(std::move(text)); });
  }
  void Grammar(const std::string& field, const OrderedJson& value) {
    Text(field, value,
         [](v1::StructuredOutput& out, std::string text) { out.set_grammar(std::move(text)); });
  }

  const std::string& taken() const { return taken_; }

 private:
  JsonFields& fields_;
  v1::GenerateRequest& out_;
  std::string taken_;
};

// A member as ordered JSON; absent or null: null. `field`: for what is wrong with it.
OrderedJson Ordered(std::string_view body, const std::string& name, JsonFields& fields,
                    const std::string& field) {
  const std::string_view text = TextOfMember(body, name);
  if (text.empty()) return nullptr;
  absl::StatusOr<OrderedJson> json = ParseOrdered(text);
  if (json.ok()) return *std::move(json);
  fields.Add(field, ToStd(json.status().message()));
  return nullptr;
}

// {"type": ...}. `nested`: chat's form, which has the schema one level deeper than the Responses'.
void TakeFormat(const OrderedJson& format, const std::string& field, bool nested,
                JsonFields& fields, Taker& taker) {
  if (format.is_null()) return;
  if (!format.is_object()) {
    fields.Add(field, "must be an object");
    return;
  }
  const OrderedJson type = format.value("type", OrderedJson());
  if (type == "text") return;
  if (type == "json_object") {
    if (v1::StructuredOutput* const out = taker.New(field)) out->set_json_object(true);
  } else if (type == "json_schema") {
    const OrderedJson own = nested ? format.value("json_schema", OrderedJson()) : format;
    const std::string path = nested ? field + ".json_schema" : field;
    if (!own.is_object() || !own.contains("schema")) {
      fields.Add(path + ".schema", "must be set");
      return;
    }
    const OrderedJson strict = own.value("strict", OrderedJson());
    if (!strict.is_null() && !strict.is_boolean())
      fields.Add(path + ".strict", "must be true or false");
    taker.Schema(path + ".schema", own["schema"],
                 /*open=*/strict.is_boolean() && !strict.get<bool>());
  } else if (type == "structural_tag") {
    if (v1::StructuredOutput* const out = taker.New(field)) out->set_structural_tag(Dump(format));
  } else {
    fields.Add(field + ".type",
               Concat("is ", CleanUtf8(Dump(type), kMaxShownBytes),
                      "; text, json_object, json_schema and structural_tag are served"));
  }
}

// vLLM's object.
void TakeStructuredOutputs(const OrderedJson& json, JsonFields& fields, Taker& taker) {
  const std::string name = "structured_outputs";
  if (json.is_null()) return;
  if (!json.is_object()) {
    fields.Add(name, "must be an object");
    return;
  }
  for (const auto& [key, value] : json.items()) {
    const std::string field = Concat(name, ".", CleanUtf8(key, kMaxShownBytes));
    const bool nothing = value.is_null() || value == false;
    if (nothing) continue;
    if (key == "json") {
      taker.Schema(field, value, /*open=*/false);
    } else if (key == "regex") {
      taker.Regex(field, value);
    } else if (key == "choice") {
      taker.Choice(field, value);
    } else if (key == "grammar") {
      taker.Grammar(field, value);
    } else if (key == "json_object") {
      if (v1::StructuredOutput* const out = taker.New(field)) out->set_json_object(true);
    } else if (key == "structural_tag") {
      const std::string text = value.is_string() ? value.get<std::string>() : Dump(value);
      if (v1::StructuredOutput* const out = taker.New(field)) out->set_structural_tag(text);
    } else {
      // Among them how much white space there may be, and what to do without this one's library.
      fields.Add(field, "is not served");
    }
  }
}

}  // namespace

std::string TakeStructuredOutput(std::string_view body, JsonFields& fields,
                                 v1::GenerateRequest& out) {
  Taker taker(fields, out);
  const auto ordered = [&](const char* const name) {
    return fields.Find(name) == nullptr ? OrderedJson() : Ordered(body, name, fields, name);
  };
  TakeFormat(ordered("response_format"), "response_format", /*nested=*/true, fields, taker);
  TakeStructuredOutputs(ordered("structured_outputs"), fields, taker);
  // vLLM's older names, SGLang's (regex, ebnf, json_schema) and llama.cpp's (grammar, json_schema).
  using Take = void (*)(Taker & taker, const std::string& field, const OrderedJson& value);
  constexpr Take kSchema = [](Taker& taker, const std::string& field, const OrderedJson& value) {
    taker.Schema(field, value, /*open=*/false);
  };
  constexpr Take kRegex = [](Taker& taker, const std::string& field, const OrderedJson& value) {
    taker.Regex(field, value);
  };
  constexpr Take kGrammar = [](Taker& taker, const std::string& field, const OrderedJson& value) {
    taker.Grammar(field, value);
  };
  constexpr Take kChoice = [](Taker& taker, const std::string& field, const OrderedJson& value) {
    taker.Choice(field, value);
  };
  for (const auto& [name, take] : {std::pair("guided_json", kSchema),
                                   {"guided_regex", kRegex},
                                   {"guided_choice", kChoice},
                                   {"guided_grammar", kGrammar},
                                   {"regex", kRegex},
                                   {"ebnf", kGrammar},
                                   {"grammar", kGrammar},
                                   {"json_schema", kSchema}}) {
    const OrderedJson json = ordered(name);
    if (!json.is_null() && json != "") take(taker, name, json);
  }
  return taker.taken();
}

std::string TakeTextFormat(std::string_view body, JsonFields& fields, v1::GenerateRequest& out) {
  Taker taker(fields, out);
  if (fields.Object("text") == nullptr) return "";
  const OrderedJson text = Ordered(body, "text", fields, "text");
  if (text.is_object()) {
    TakeFormat(text.value("format", OrderedJson()), "text.format", /*nested=*/false, fields, taker);
  }
  return taker.taken();
}

std::string TakeOutputFormat(std::string_view body, JsonFields& fields, v1::GenerateRequest& out) {
  Taker taker(fields, out);
  if (fields.Object("output_config") != nullptr) {
    const OrderedJson config = Ordered(body, "output_config", fields, "output_config");
    if (config.is_object())
      TakeFormat(config.value("format", OrderedJson()), "output_config.format", /*nested=*/false,
                 fields, taker);
  }
  TakeFormat(Ordered(body, "output_format", fields, "output_format"), "output_format",
             /*nested=*/false, fields, taker);
  return taker.taken();
}

}  // namespace winnow::server
