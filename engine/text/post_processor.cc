#include "engine/text/post_processor.h"

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"

namespace winnow::engine {

absl::StatusOr<PostProcessor> PostProcessor::Make(const std::optional<JsonNode>& json,
                                                  int32_t id_end) {
  PostProcessor processor;
  if (json) WINNOW_RETURN_IF_ERROR(processor.Read(*json, id_end));
  return processor;
}

absl::Status PostProcessor::Read(const JsonNode& json, int32_t id_end) {
  WINNOW_ASSIGN_OR_RETURN(const JsonNode type_node, json.Member("type"));
  WINNOW_ASSIGN_OR_RETURN(const std::string type, type_node.String());
  if (type == "ByteLevel") return absl::OkStatus();
  if (type == "Sequence") {
    WINNOW_ASSIGN_OR_RETURN(const JsonNode list, json.Member("processors"));
    WINNOW_RETURN_IF_ERROR(list.RequireArray());
    for (size_t i = 0; i < list.size(); ++i) WINNOW_RETURN_IF_ERROR(Read(list.At(i), id_end));
    return absl::OkStatus();
  }
  if (type != "TemplateProcessing") {
    return type_node.Unsupported(
        Concat("post_processor \"", type,
               "\" is not supported (TemplateProcessing, ByteLevel, Sequence are)"));
  }
  if (template_) return json.Unsupported("a second template is not supported");
  template_.emplace();
  WINNOW_ASSIGN_OR_RETURN(const JsonNode specials, json.Member("special_tokens"));
  WINNOW_RETURN_IF_ERROR(specials.RequireObject());
  WINNOW_ASSIGN_OR_RETURN(const JsonNode single, json.Member("single"));
  WINNOW_RETURN_IF_ERROR(single.RequireArray());
  constexpr size_t kPartsMax = 64;
  if (single.size() > kPartsMax) return single.Error(Concat("more than ", kPartsMax, " parts"));
  for (size_t i = 0; i < single.size(); ++i) {
    const JsonNode piece = single.At(i);
    WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> sequence, piece.Optional("Sequence"));
    if (sequence) {
      WINNOW_ASSIGN_OR_RETURN(const JsonNode id_node, sequence->Member("id"));
      WINNOW_ASSIGN_OR_RETURN(const std::string id, id_node.String());
      if (id != "A") return id_node.Error("must be \"A\": a single text has no other sequence");
      template_->push_back({true, {}});
      continue;
    }
    WINNOW_ASSIGN_OR_RETURN(const JsonNode special, piece.Member("SpecialToken"));
    WINNOW_ASSIGN_OR_RETURN(const JsonNode name_node, special.Member("id"));
    WINNOW_ASSIGN_OR_RETURN(const std::string name, name_node.String());
    auto found = specials.value().find(name);
    if (found == specials.value().end()) return name_node.Error("is not among special_tokens");
    const JsonNode entry(&*found, Concat(specials.path(), "[\"", name, "\"]"));
    WINNOW_ASSIGN_OR_RETURN(const JsonNode ids, entry.Member("ids"));
    WINNOW_RETURN_IF_ERROR(ids.RequireArray());
    if (ids.size() > kPartsMax) return ids.Error(Concat("more than ", kPartsMax, " ids"));
    Part part{false, {}};
    for (size_t k = 0; k < ids.size(); ++k) {
      WINNOW_ASSIGN_OR_RETURN(const int64_t id, ids.At(k).Integer(0, int64_t{id_end} - 1));
      part.ids.push_back(static_cast<int32_t>(id));
    }
    template_->push_back(std::move(part));
  }
  return absl::OkStatus();
}

std::vector<int32_t> PostProcessor::Apply(std::vector<int32_t> ids, bool add_special_tokens) const {
  if (!template_) return ids;
  std::vector<int32_t> out;
  out.reserve(ids.size() + 8);
  for (const Part& part : *template_) {
    if (part.is_text) {
      out.insert(out.end(), ids.begin(), ids.end());
    } else if (add_special_tokens) {
      out.insert(out.end(), part.ids.begin(), part.ids.end());
    }
  }
  return out;
}

}  // namespace winnow::engine
