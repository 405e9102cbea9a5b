#include "bench/eval_words.h"

#include <iterator>

#include "fmt/format.h"

namespace winnow::bench {
namespace {

constexpr std::string_view kAdjectives[] = {
    "amber",   "ancient", "bitter",  "bold",    "brave",    "bright",   "brisk",  "broken",
    "bronze",  "calm",    "careful", "clever",  "cloudy",   "copper",   "cosy",   "crimson",
    "crooked", "curious", "dapper",  "daring",  "dusty",    "eager",    "early",  "earnest",
    "elegant", "faded",   "faint",   "fancy",   "fearless", "fierce",   "flat",   "fond",
    "fragile", "frosty",  "gentle",  "giant",   "gilded",   "glassy",   "golden", "graceful",
    "grand",   "grey",    "hasty",   "hidden",  "hollow",   "honest",   "humble", "icy",
    "idle",    "ivory",   "jolly",   "jumpy",   "keen",     "kind",     "lanky",  "lazy",
    "leafy",   "light",   "little",  "lively",  "lonely",   "loud",     "lucky",  "lunar",
    "mellow",  "merry",   "mighty",  "misty",   "modest",   "muddy",    "narrow", "nimble",
    "noble",   "odd",     "olive",   "pale",    "patient",  "plain",    "polite", "proud",
    "purple",  "quick",   "quiet",   "rapid",   "rare",     "restless", "rigid",  "rough",
    "round",   "royal",   "rusty",   "sandy",   "scarlet",  "shallow",  "sharp",  "shiny",
    "shy",     "silent",  "silver",  "simple",  "sleepy",   "slender",  "smooth", "snowy",
    "solemn",  "sour",    "spare",   "steady",  "steep",    "stern",    "stormy", "sturdy",
    "subtle",  "sunny",   "swift",   "tall",    "tame",     "tender",   "thorny", "tidy",
    "timid",   "tiny",    "tough",   "upright", "urban",    "vast",     "velvet", "violet",
    "vivid",   "warm",    "wary",    "weary",   "wild",     "windy",    "wise",   "witty",
    "wooden",  "worn",    "woven",   "yellow",  "young",    "zealous"};

constexpr std::string_view kNouns[] = {
    "acorn",    "anchor",  "anvil",    "apple",   "apron",    "arrow",   "badge",  "bakery",
    "barge",    "barley",  "barrel",   "basin",   "basket",   "beacon",  "bell",   "bench",
    "berry",    "blanket", "boat",     "bottle",  "bracelet", "branch",  "brick",  "bridge",
    "broom",    "brush",   "bucket",   "button",  "cabin",    "cable",   "candle", "canvas",
    "canyon",   "carpet",  "castle",   "cellar",  "chain",    "chair",   "chapel", "cherry",
    "chest",    "chimney", "cider",    "circle",  "cliff",    "clock",   "cloth",  "clover",
    "coat",     "cobbler", "comet",    "compass", "coral",    "cottage", "cradle", "crane",
    "crayon",   "creek",   "crown",    "crystal", "cup",      "curtain", "dagger", "daisy",
    "desk",     "diary",   "dome",     "drum",    "easel",    "elbow",   "engine", "falcon",
    "feather",  "fence",   "fern",     "fiddle",  "field",    "flute",   "forest", "forge",
    "fountain", "fox",     "garden",   "garnet",  "gate",     "glacier", "glove",  "goblet",
    "granite",  "grape",   "guitar",   "hammer",  "harbour",  "harp",    "hat",    "hazel",
    "hedge",    "helmet",  "heron",    "hinge",   "honey",    "hook",    "horn",   "inkwell",
    "island",   "jacket",  "jar",      "jewel",   "kettle",   "key",     "kite",   "knot",
    "ladder",   "lagoon",  "lamp",     "lantern", "lemon",    "lens",    "letter", "lever",
    "library",  "lily",    "linen",    "loom",    "magnet",   "mango",   "mantle", "map",
    "maple",    "marble",  "market",   "mask",    "meadow",   "medal",   "mill",   "mirror",
    "mitten",   "moss",    "mountain", "mug",     "nail",     "needle",  "nest",   "nettle",
    "notebook", "oak",     "oar",      "ocean",   "orchard",  "organ",   "otter",  "oven",
    "paddle",   "palace",  "pebble",   "pencil",  "pepper",   "piano",   "pigeon", "pillow",
    "pine",     "plank",   "plough",   "pocket",  "pond",     "poppy",   "prism",  "pulley",
    "quarry",   "quill",   "rabbit",   "raft",    "rail",     "ribbon",  "ridge",  "ring",
    "river",    "rope",    "rudder",   "saddle",  "sail",     "scarf",   "scroll", "shell",
    "shovel",   "sieve",   "spade",    "spindle", "spoon",    "stable",  "statue", "stone",
    "stove",    "tablet",  "teapot",   "temple",  "thimble",  "thistle", "ticket", "tower",
    "trumpet",  "tulip",   "tunnel",   "turtle",  "umbrella", "valley",  "vase",   "violin",
    "wagon",    "walnut",  "wheel",    "whistle", "willow",   "window",  "wrench", "yarn"};

constexpr std::string_view kVerbs[] = {"carried", "painted",  "found",   "mended",  "sold",
                                       "hid",     "borrowed", "cleaned", "drew",    "kept",
                                       "lost",    "measured", "moved",   "noticed", "returned",
                                       "shared",  "studied",  "watched", "weighed", "wrapped"};
constexpr std::string_view kPlaces[] = {"behind", "beside", "near", "beyond", "under", "above"};
constexpr std::string_view kTimes[] = {
    "in the morning",     "before noon",     "after supper", "on a rainy day", "late in the year",
    "at the first frost", "during the fair", "once a week",  "without a word", "for the last time"};
constexpr std::string_view kPeople[] = {"baker",    "sailor",    "weaver",    "teacher",
                                        "miller",   "farmer",    "tailor",    "printer",
                                        "gardener", "carpenter", "traveller", "merchant"};

constexpr std::string_view kFirstNames[] = {
    "Ada",    "Albin",  "Agnes",  "Anselm",  "Beata",  "Bruno",   "Carla",   "Caspar", "Clara",
    "Conrad", "Dora",   "Edgar",  "Edith",   "Elias",  "Elsa",    "Emil",    "Erika",  "Felix",
    "Flora",  "Frieda", "Georg",  "Greta",   "Gustav", "Hanna",   "Hector",  "Helena", "Hugo",
    "Ida",    "Irma",   "Isidor", "Jonas",   "Judith", "Julius",  "Karin",   "Klara",  "Konrad",
    "Laura",  "Leon",   "Linus",  "Lydia",   "Magnus", "Marta",   "Matilda", "Moritz", "Nadia",
    "Nils",   "Nora",   "Oscar",  "Ottilie", "Paula",  "Quentin", "Regina",  "Rosa",   "Rufus",
    "Selma",  "Silas",  "Thea",   "Tobias",  "Vera",   "Viktor"};
constexpr std::string_view kLastNames[] = {
    "Abeling",   "Ardmore",  "Barlow",    "Beckhurst",   "Bellamy",   "Bramwell",  "Brandt",
    "Carvell",   "Castell",  "Colbrook",  "Corrigan",    "Dalhaus",   "Denholm",   "Dorning",
    "Eastwell",  "Elmgren",  "Fairley",   "Falkner",     "Fenwick",   "Forsberg",  "Galloway",
    "Garrick",   "Glaser",   "Grimley",   "Hallam",      "Hartwig",   "Haverly",   "Holmqvist",
    "Ingram",    "Jansson",  "Kellner",   "Kerrigan",    "Kingsley",  "Lambert",   "Langley",
    "Lindqvist", "Lockhart", "Malvern",   "Marlowe",     "Merrick",   "Norwell",   "Oakden",
    "Olander",   "Pargeter", "Pembroke",  "Quillan",     "Radcliff",  "Ravenhall", "Redfern",
    "Rosenthal", "Sandell",  "Selwyn",    "Sheridan",    "Soderberg", "Stanhope",  "Tarrant",
    "Thorburn",  "Tremayne", "Underhill", "Vantongeren", "Wakefield", "Westerby",  "Wolfram",
    "Zeller"};
constexpr std::string_view kTownHeads[] = {
    "Alder", "Ash",  "Birch",  "Black", "Brack", "Clay",  "Cold",  "Dun",  "Elm",
    "Fair",  "Glen", "Green",  "Har",   "High",  "Holt",  "Kings", "Lang", "Lyn",
    "Mar",   "Mill", "Nether", "North", "Ox",    "Penn",  "Red",   "Rock", "Salt",
    "South", "Stan", "Thorn",  "Wal",   "West",  "White", "Win",   "Wood", "Yar"};
constexpr std::string_view kTownTails[] = {
    "bourne", "bridge", "brook", "bury",  "by",   "combe", "dale",  "den",  "field",   "ford",
    "gate",   "ham",    "haven", "hurst", "ley",  "low",   "marsh", "mere", "minster", "mouth",
    "port",   "stead",  "stoke", "ton",   "wall", "well",  "wick",  "worth"};
constexpr std::string_view kRiverTails[] = {"are", "el", "enna", "eth", "ine", "or", "une", "ys"};
constexpr std::string_view kProfessions[] = {
    "architect", "astronomer", "botanist",   "cartographer", "chemist",   "composer",
    "engineer",  "geologist",  "historian",  "painter",      "physician", "poet",
    "sculptor",  "surveyor",   "translator", "zoologist"};
constexpr std::string_view kInstruments[] = {"bassoon", "cello",    "clarinet", "flute",
                                             "harp",    "mandolin", "oboe",     "organ",
                                             "piano",   "trombone", "viola",    "violin"};
constexpr std::string_view kProducts[] = {"bells", "bricks", "cheese", "clocks",  "glass", "gloves",
                                          "honey", "lace",   "paper",  "pottery", "rope",  "salt"};

std::string Capitalised(std::string_view word) {
  std::string text(word);
  if (text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 'a' + 'A');
  return text;
}

std::string Year(EvalRandom& random, int first, int last) {
  return fmt::format("{}", first + static_cast<int>(random.Below(last - first + 1)));
}

// A pair that is drawn at random is new with a probability above this; else a third word is added.
constexpr size_t kPairs = std::size(kAdjectives) * std::size(kNouns);
constexpr size_t kPairsDrawnAtMost = kPairs / 2;

}  // namespace

size_t EvalRandom::Below(size_t count) {
  // Draws beyond the largest multiple of `count` would make small numbers likelier.
  const uint64_t largest = UINT64_MAX - UINT64_MAX % count;
  uint64_t drawn = engine_();
  while (drawn >= largest) drawn = engine_();
  return drawn % count;
}

uint64_t SeedFrom(uint64_t seed, std::string_view text) {
  uint64_t hash = 0xCBF29CE484222325 ^ (seed * 0x9E3779B97F4A7C15);
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

template <typename Make>
std::string UniqueTexts::Draw(const Make& make) {
  while (true) {
    std::string text = make();
    if (drawn_.insert(text).second) return text;
  }
}

std::string UniqueTexts::WordPair() {
  return Draw([&] {
    std::string text = fmt::format("{}-{}", random_.OneOf(kAdjectives), random_.OneOf(kNouns));
    if (drawn_.size() > kPairsDrawnAtMost) {
      text = fmt::format("{}-{}", random_.OneOf(kAdjectives), text);
    }
    return text;
  });
}

std::string UniqueTexts::Digits(int count) {
  return Draw([&] {
    std::string text(1, static_cast<char>('1' + random_.Below(9)));
    while (static_cast<int>(text.size()) < count)
      text += static_cast<char>('0' + random_.Below(10));
    return text;
  });
}

std::string UniqueTexts::Uuid() {
  return Draw([&] {
    std::string text = "xxxxxxxx-xxxx-4xxx-yxxx-xxxxxxxxxxxx";
    for (char& c : text) {
      if (c == 'x') c = "0123456789abcdef"[random_.Below(16)];
      if (c == 'y') c = "89ab"[random_.Below(4)];
    }
    return text;
  });
}

std::string UniqueTexts::Letters(int count) {
  return Draw([&] {
    std::string text(count, ' ');
    for (char& c : text) c = static_cast<char>('a' + random_.Below(26));
    return text;
  });
}

std::string UniqueTexts::Capitals(int count) {
  return Draw([&] {
    std::string text(count, ' ');
    for (char& c : text) c = static_cast<char>('A' + random_.Below(26));
    return text;
  });
}

std::vector<std::string> DistinctWords(int64_t count, EvalRandom& random) {
  std::vector<std::string> words(std::begin(kNouns), std::end(kNouns));
  words.insert(words.end(), std::begin(kAdjectives), std::end(kAdjectives));
  random.Shuffle(words);
  UniqueTexts texts(random);
  while (static_cast<int64_t>(words.size()) < count) words.push_back(texts.WordPair());
  words.resize(count);
  // Words of one kind must not come first: the caller takes those for something of their own.
  random.Shuffle(words);
  return words;
}

std::string ProseSentence(EvalRandom& random) {
  const auto thing = [&] {
    return fmt::format("{} {}", random.OneOf(kAdjectives), random.OneOf(kNouns));
  };
  const std::string_view person = random.OneOf(kPeople), verb = random.OneOf(kVerbs);
  switch (random.Below(6)) {
    case 0:
      return fmt::format("The {} {} the {} {}.", person, verb, thing(), random.OneOf(kTimes));
    case 1:
      return fmt::format("{}, the {} {} a {} {} the {}.", Capitalised(random.OneOf(kTimes)), person,
                         verb, thing(), random.OneOf(kPlaces), thing());
    case 2:
      return fmt::format("Nobody knew why the {} stood {} the {}.", thing(), random.OneOf(kPlaces),
                         thing());
    case 3:
      return fmt::format("A {} is worth more than a {}, said the {} who {} both.", thing(), thing(),
                         person, verb);
    case 4:
      return fmt::format("When the {} {} the {}, the {} laughed {}.", person, verb, thing(),
                         random.OneOf(kPeople), random.OneOf(kTimes));
    default:
      return fmt::format("It took the {} {} days to walk from the {} to the {}.", person,
                         3 + random.Below(60), thing(), thing());
  }
}

std::string FactWriter::PersonName() {
  while (true) {
    std::string name =
        fmt::format("{} {}. {}", random_.OneOf(kFirstNames),
                    static_cast<char>('A' + random_.Below(26)), random_.OneOf(kLastNames));
    if (names_.insert(name).second) return name;
  }
}

std::string FactWriter::TownName() {
  while (true) {
    std::string name = fmt::format("{}{}", random_.OneOf(kTownHeads), random_.OneOf(kTownTails));
    // There are about a thousand short names.
    if (names_.size() > 400) name = fmt::format("{} {}", Capitalised(random_.OneOf(kNouns)), name);
    if (names_.insert(name).second) return name;
  }
}

FactPassage FactWriter::PersonOf(const std::string& birthplace) {
  FactPassage passage;
  passage.title = PersonName();
  const std::string& name = passage.title;
  const std::string born = Year(random_, 1780, 1910);
  const std::string profession(random_.OneOf(kProfessions));
  const std::string instrument(random_.OneOf(kInstruments));
  const std::string employer = TownName();
  passage.text = fmt::format(
      "{} was born in {} in the town of {}. By profession {}, {} worked for the city of {}, played "
      "the {} in the evenings and collected {} {}s.",
      name, born, birthplace, profession, name, employer, instrument, random_.OneOf(kAdjectives),
      random_.OneOf(kNouns));
  passage.questions = {{fmt::format("In which year was {} born?", name), {born}},
                       {fmt::format("In which town was {} born?", name), {birthplace}},
                       {fmt::format("What was the profession of {}?", name), {profession}},
                       {fmt::format("Which instrument did {} play?", name), {instrument}},
                       {fmt::format("For which city did {} work?", name), {employer}}};
  return passage;
}

FactPassage FactWriter::TownOf(const std::string& name, TownFacts* facts) {
  FactPassage passage;
  passage.title = name;
  TownFacts made;
  made.river = fmt::format("{}{}", random_.OneOf(kTownHeads), random_.OneOf(kRiverTails));
  made.founded = Year(random_, 1050, 1690);
  made.founder = PersonName();
  const std::string product(random_.OneOf(kProducts));
  passage.text = fmt::format(
      "{} is a town on the river {}. It was founded in {} by {}, and is known for its {}. About "
      "{},000 people live there.",
      name, made.river, made.founded, made.founder, product, 2 + random_.Below(90));
  passage.questions = {
      {fmt::format("On which river does the town of {} lie?", name), {made.river}},
      {fmt::format("In which year was the town of {} founded?", name), {made.founded}},
      {fmt::format("Who founded the town of {}?", name), {made.founder}},
      {fmt::format("What is the town of {} known for?", name), {product}}};
  if (facts != nullptr) *facts = made;
  return passage;
}

LinkedPassages FactWriter::PersonAndTown() {
  LinkedPassages linked;
  TownFacts facts;
  const std::string town = TownName();
  linked.town = TownOf(town, &facts);
  linked.person = PersonOf(town);
  const std::string& name = linked.person.title;
  linked.questions = {
      {fmt::format("On which river lies the town where {} was born?", name), {facts.river}},
      {fmt::format("In which year was the town founded where {} was born?", name), {facts.founded}},
      {fmt::format("Who founded the town where {} was born?", name), {facts.founder}}};
  return linked;
}

}  // namespace winnow::bench
