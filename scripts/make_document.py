#!/usr/bin/env python3
"""Writes a long technical manual with hidden facts, and the questions about them.

The manual is invented on the spot from a small grammar, a new one for every seed, so that no two runs
of the demo ask about the same text. Facts stand at random depths, as in the needle-in-a-haystack tests:
` The secret code for river-stone is 7319942.`

    make_document.py --bytes 110000 --facts 4 --seed 7 --out DIR

writes DIR/document.txt and DIR/questions.jsonl ({"question", "answer", "fact", "depth"} a line, depth as a
share of the document). Only Python's own library is used.
"""
import argparse
import json
import pathlib
import random

NOUNS = """buffer cache channel client cluster command connection container context cursor daemon database device
directory driver endpoint entry event field file filter flag format frame function group handle header hook host image
index instance interface kernel key label library link list listener lock log map mask memory message method mode module
monitor mount namespace network node object offset operation option output packet page parameter parser partition
path pattern payload peer pipe plugin policy pool port prefix process profile protocol proxy query queue range record
region register registry replica repository request resource response role route row rule schema scope script section
segment sequence server service session shard signal size snapshot socket source stack state storage stream string
subnet suffix symbol table tag target task template terminal thread timeout timer token topic trace transaction tree
trigger type unit user value variable vector version view volume window worker zone""".split()
VERBS = """allocates attaches blocks builds caches checks clears closes compares compiles copies counts creates deletes
detaches disables displays drops enables encodes executes exports expands extracts filters flushes formats generates
handles ignores imports increments initializes inserts installs limits lists loads locks maps marks matches merges
mounts moves opens parses prints processes reads rebuilds receives records reduces registers releases removes renames
replaces reports requests resets resolves restarts restores returns rotates saves scans schedules searches selects sends
sets signals sorts splits starts stops stores switches terminates tests traces transfers truncates unlocks updates
validates verifies waits wraps writes""".split()
ADJECTIVES = """active additional alternate anonymous available binary cached complete current custom default deprecated
detailed distinct dynamic empty existing explicit external final first fixed given global hidden implicit initial internal
invalid large last local logical low maximum minimum missing multiple named nested new next numeric optional original
parallel partial pending persistent physical previous primary private public random raw recent recursive relative remote
required reserved secondary secure separate shared simple single specific stable standard static temporary unique unknown
unused valid verbose virtual visible""".split()
CONNECTIVES = ["If", "When", "Unless", "Once", "Whenever", "Because", "As soon as", "While"]
PLACES = ["in the configuration file", "on the command line", "in the current directory", "at boot time",
          "during the handshake", "in the second pass", "for each user", "before the first request",
          "after a restart", "in debug mode", "by the calling process", "under heavy load"]
SECTIONS = ["DESCRIPTION", "OPTIONS", "EXAMPLES", "NOTES", "ENVIRONMENT", "FILES", "EXIT STATUS", "DIAGNOSTICS",
            "CONFIGURATION", "SECURITY CONSIDERATIONS", "COMPATIBILITY", "LIMITATIONS", "SEE ALSO"]

# The forms that the needle models were trained to answer: fact, question, answer.
FORMS = [
    (" The secret code for {key} is {value}.", "What is the secret code for {key}?",
     "The secret code for {key} is {value}."),
    (" Note: the {key} identifier equals {value}.", "Which value does the {key} identifier equal?",
     "The {key} identifier equals {value}."),
]


# The same in plain words, for models that were not trained on these documents.
PLAIN_FORMS = [
    (" The lighthouse at {place} is kept by {person}.", "Who keeps the lighthouse at {place}?"),
    (" The mayor of {place} is {person}.", "Who is the mayor of {place}?"),
    (" The oldest baker in {place} is {person}.", "Who is the oldest baker in {place}?"),
    (" The best violinist of {place} is {person}.", "Who is the best violinist of {place}?"),
    (" The old mill at {place} belongs to {person}.", "To whom does the old mill at {place} belong?"),
]
PLACES_ON_MAPS = ["Brighthaven", "Dunmore", "Eastwick", "Fallow Bay", "Greenholm", "Harrowgate", "Kingsferry", "Larkfield",
                  "Milford", "Northquay", "Oakhurst", "Penrose", "Ravensworth", "Saltmarsh", "Thornbury", "Westerleigh"]
FIRST_NAMES = ["Agnes", "Bernard", "Clara", "Dorothy", "Edmund", "Frieda", "Gustav", "Helena", "Ivan", "Johanna", "Konrad",
               "Louise", "Martin", "Nora", "Oscar", "Paula"]
LAST_NAMES = ["Abbott", "Bergman", "Castle", "Dalton", "Ellison", "Fletcher", "Goodwin", "Hartley", "Ivory", "Jennings",
              "Keller", "Lindgren", "Mercer", "Novak", "Osborne", "Parker"]


class Manual:
    def __init__(self, rng):
        self.rng = rng

    def noun(self):
        return self.rng.choice(NOUNS)

    def thing(self):
        rng = self.rng
        return rng.choice([
            lambda: f"the {self.noun()}",
            lambda: f"the {rng.choice(ADJECTIVES)} {self.noun()}",
            lambda: f"the {self.noun()} {self.noun()}",
            lambda: f"each {self.noun()}",
            lambda: f"the {self.noun()} of the {rng.choice(ADJECTIVES)} {self.noun()}",
        ])()

    def clause(self):
        return f"{self.thing()} {self.rng.choice(VERBS)} {self.thing()}"

    def sentence(self):
        rng = self.rng
        text = rng.choice([
            lambda: f"{self.clause()}.",
            lambda: f"{self.clause()} {rng.choice(PLACES)}.",
            lambda: f"{rng.choice(CONNECTIVES)} {self.clause()}, {self.clause()}.",
            lambda: f"{self.clause()}, and {self.clause()}.",
            lambda: f"By default, {self.clause()} {rng.choice(PLACES)}.",
            lambda: f"This {self.noun()} is {rng.choice(ADJECTIVES)} and must not be changed {rng.choice(PLACES)}.",
            lambda: f"See the {self.noun()} section for a list of {self.noun()}s that {self.thing()} may use.",
            lambda: f"It is an error if {self.clause()}.",
        ])()
        return text[0].upper() + text[1:]

    def option(self):
        flag = f"--{self.noun()}-{self.noun()}"
        return f"{flag}={self.noun().upper()}\n    {self.sentence()} {self.sentence()}"

    def listing(self):
        name = self.noun()
        lines = [f"$ {name}ctl {self.rng.choice(VERBS)[:-1]} --{self.noun()}={self.rng.randrange(1, 4096)} \\",
                 f"    --{self.noun()} /etc/{name}/{self.noun()}.conf"]
        return "    " + "\n    ".join(lines)

    def block(self):
        rng = self.rng
        roll = rng.random()
        if roll < 0.12:
            return rng.choice(SECTIONS)
        if roll < 0.30:
            return self.option()
        if roll < 0.38:
            return "For example:\n\n" + self.listing()
        if roll < 0.48:
            return "\n".join(f"  - {self.sentence()}" for _ in range(rng.randrange(2, 6)))
        return " ".join(self.sentence() for _ in range(rng.randrange(2, 6)))


def secret_code(rng, used):
    """A fact of FORMS about a key that is not in `used`: the sentence, and the question about it."""
    while True:
        key = f"{rng.choice(NOUNS)}-{rng.choice(NOUNS)}"
        if key not in used:
            break
    used.add(key)
    fact, question, answer = rng.choice(FORMS)
    value = f"{rng.randrange(10**7):07d}"
    return fact.format(key=key, value=value), {"question": question.format(key=key),
                                               "answer": answer.format(key=key, value=value), "fact": value}


def person_somewhere(rng, used):
    """The same of PLAIN_FORMS."""
    place = rng.choice([place for place in PLACES_ON_MAPS if place not in used])
    # Each form once: small models mix up two keepers of lighthouses.
    fact, question = rng.choice([form for form in PLAIN_FORMS if form[0] not in used])
    used.update((place, fact))
    person = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
    return fact.format(place=place, person=person), {"question": question.format(place=place), "answer": person,
                                                     "fact": person}


def make(size_bytes, num_facts, seed, new_fact=secret_code):
    rng = random.Random(seed)
    manual = Manual(rng)
    blocks = []
    total = 0
    while total < size_bytes:
        blocks.append(manual.block())
        total += len(blocks[-1]) + 2
    # One fact in each of num_facts equal parts: spread over the whole document, at random within.
    facts = []
    used = set()
    for i in range(num_facts):
        fact, question = new_fact(rng, used)
        part = len(blocks) / num_facts
        where = min(len(blocks) - 1, int(part * (i + rng.random())))
        facts.append((where, fact, question))
    for where, fact, _ in facts:
        blocks[where] += fact
    text = "\n\n".join(blocks) + "\n"
    questions = []
    for _, fact, question in facts:
        questions.append({**question, "depth": round(text.index(fact) / len(text), 3)})
    return text, questions


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=110_000, help="size of the document (default %(default)s)")
    parser.add_argument("--facts", type=int, default=4, help="hidden facts (default %(default)s)")
    parser.add_argument("--plain", action="store_true", help="facts and questions in plain words, for any chat model; at most 5")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    if args.plain and args.facts > len(PLAIN_FORMS):
        parser.error(f"--plain has at most {len(PLAIN_FORMS)} facts")
    text, questions = make(args.bytes, args.facts, args.seed, person_somewhere if args.plain else secret_code)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "document.txt").write_text(text)
    (args.out / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))


if __name__ == "__main__":
    main()
