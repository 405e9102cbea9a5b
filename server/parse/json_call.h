// A call of a function as a JSON object, {"name": "f", "arguments": {...}}, read byte by byte: the arguments are given
// on as they come, because a client shows them so.
//
// "parameters" is another word for "arguments". Other members are passed over. Nesting costs a counter, not a stack.
// Whether the arguments are good JSON is for the client to see; here a string is followed to its end, and brackets are
// counted.
#ifndef WINNOW_SERVER_PARSE_JSON_CALL_H_
#define WINNOW_SERVER_PARSE_JSON_CALL_H_

#include <string>

namespace winnow::server {

class JsonCall {
 public:
  enum class State {
    kOpen,    // more is to come
    kDone,    // the byte was its last
    kBroken,  // the byte cannot stand here, or the name is no string: it was no call
  };
  // REQUIRES: every call before gave kOpen.
  State Add(char c);

  // Behind a member's value.
  bool at_member_end() const { return place_ == Place::kAfterValue; }
  bool has_name() const { return has_name_; }
  const std::string& name() const { return name_; }
  // Arguments that have come since the last call; once the name is known. All of them, once it is done: "{}" if there
  // are none.
  std::string TakeArguments();
  // Everything since the beginning, as it came; kept until the name is known.
  const std::string& text() const { return text_; }

 private:
  enum class Place {
    kBeforeObject,
    kBeforeKey,
    kInKey,
    kAfterKey,
    kBeforeValue,
    kInValue,
    kAfterValue
  };
  enum class Member { kName, kArguments, kOther };

  State AddKeyByte(char c);
  State AddValueByte(char c);
  State EndValue();
  State AddAfterValue(char c);

  Place place_ = Place::kBeforeObject;
  Member member_ = Member::kOther;
  std::string text_, key_, value_;
  int depth_ = 0;
  bool in_string_ = false, escaped_ = false;
  bool is_container_ = false;  // the value is an object or a list
  bool has_name_ = false, has_arguments_ = false;
  bool given_ = false;  // some of the arguments were taken
  std::string name_, arguments_;
};

}  // namespace winnow::server

#endif  // WINNOW_SERVER_PARSE_JSON_CALL_H_
