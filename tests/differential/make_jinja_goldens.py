#!/usr/bin/env python3
"""Writes tests/golden/jinja.json: small templates of our own, and what Python's jinja2 makes of them.

    pip install -r requirements.txt; ./make_jinja_goldens.py > ../golden/jinja.json

Each case is [template, rendered text, or null where jinja2 raises]. All see the variables of CONTEXT.
"""
import json
import sys

from template_differential import environment

CONTEXT = {
    "s": "Hello World", "pad": "  a b \n", "u": "stra\u00dfe \u0130x \u03a3\u03a3 \U0001f642", "empty": "", "n": 7, "f": 2.5, "t": True, "none_": None,
    "list_": [3, 1, 2], "words": ["b", "A", "c"], "d": {"b": 1, "a": [1, 2.0, None, True, "x'y"], "items": "mine"},
    "users": [{"name": "Ann", "age": 31, "tags": ["x"]}, {"name": "bob", "age": 4}, {"name": "Cy", "age": 31}],
    "nested": [[1, [2, 3]], [4]],
}

EXPRESSIONS = """
1 + 2 * 3 - 4 // 3 % 2
7 // -2 ~ ' ' ~ 7 % -2 ~ ' ' ~ -7 // 2 ~ ' ' ~ -7 % 2
7.5 // -2 ~ ' ' ~ 7.5 % -2 ~ ' ' ~ -7.5 % 2 ~ ' ' ~ 6.0 % 3
2 ** 3 ** 2
-2 ** 2
2 ** -1
10 / 4 ~ ' ' ~ 10 / 5
1 / 0
1 % 0
1.0 // 0
true + true
1 == 1.0 == true
1 < 2 < 3
1 < 3 < 2
3 > 2 >= 2 != 1
'a' < 'b' and not 'a' > 'b'
[1, 2] < [1, 3]
(1, 2) == [1, 2]
1 < 'a'
none < 1
'a' in 'cat' and 'x' not in 'cat'
1 in 'cat'
2 in list_ and 9 not in list_
'b' in d and 'z' not in d
1 in none
[] in d
x in list_
1 if false
1 if false else 2 if true else 3
x
x.y
x['y']
x + 1
x ~ 'a'
x == y
none_.foo
none_.foo.bar
none_ ~ ''
s.nope is defined
s.upper is defined
d.items is callable
d['items']
d.items() | list
d.get('z') ~ d.get('z', 4) ~ d.get('b')
d.keys() | list
d.values() | list
d
[d, none, true, 1.0, 'it\\'s', "say \\"x\\"", 'both \\' "']
(1,)
()
{}
{'a': 1, 2: [3], none: (4, 5)}
{[]: 1}
list_.append(4)
d.update({})
d.clear
s.__class__
s.__class__.__mro__
d._x is defined
'%s and %d and %05.1f and %x and %r' % (s, n, f, 255, s)
'%s' % d
'%(b)s %(b)03d' % d
'%s %s' % (1,)
'%d' % 'x'
'%%' % ()
'%5s|%-5s|%.2s' % ('ab', 'ab', 'abc')
'{} {1}'.format(1, 2)
'{} {} {x}'.format(1, 'b', x=3)
'{0[1]} {1.name} {2!r:>8}'.format(list_, users[0], 'q')
'{:>5}|{:<5}|{:^5}|{:*^7}|{:05d}|{:+.2f}|{:,}|{:x}|{:b}|{:.1%}'.format('a', 'b', 'c', 'd', 42, 2.345, 1234567, 255, 5, 0.256)
'{'.format()
'{0.__class__}'.format(s)
s[0] ~ s[-1] ~ s[100]
s[1:4] ~ '|' ~ s[::-1] ~ '|' ~ s[-3:] ~ '|' ~ s[:-3] ~ '|' ~ s[::3] ~ '|' ~ s[8:2:-2]
u[5] ~ u[-1] ~ u[4:8] ~ (u | length)
list_[1:] ~ list_[::-1] ~ list_[5:]
list_[::0]
list_['a':]
list_[1.5]
list_['count'](3)
d[1:2]
none_[1:]
range(5)[1:4] | list
range(3) ~ range(1, 10, 3) ~ (range(5, 0, -2) | list)
range(100001)
range(0, 10, 0)
s.upper() ~ s.lower() ~ s.title() ~ s.swapcase() ~ s.capitalize()
u.upper()
u.lower()
u.title()
u | title
u | capitalize
u | upper
"they're bill's-friends (from) the_UK" | title
"they're bill's-friends".title()
pad.strip() ~ '|' ~ pad.lstrip() ~ '|' ~ pad.rstrip() ~ '|'
'xxaxx'.strip('x') ~ 'abcba'.lstrip('ba') ~ ('--a-' | trim('-'))
'a,b,,c'.split(',')
' a  b '.split() ~ ' a  b '.split(' ')
'a,b,c'.split(',', 1) ~ 'a,b,c'.rsplit(',', 1) ~ ' a b  c '.rsplit(none, 1) ~ ' a b  c '.split(none, 1)
'a'.split('')
''.split() ~ ''.split(',')
'a\\nb\\r\\nc\\u2028d\\n'.splitlines() ~ 'a\\nb'.splitlines(true)
s.startswith('He') ~ s.startswith(('x', 'H')) ~ s.endswith('ld') ~ s.startswith('lo', 3) ~ s.startswith('') ~ s.startswith('', 50)
s.find('o') ~ s.rfind('o') ~ s.find('z') ~ s.find('o', 5) ~ u.find('x') ~ s.index('W') ~ s.count('l') ~ s.count('')
s.index('z')
s.replace('l', 'L') ~ s.replace('l', 'L', 1) ~ s.replace('', '-') ~ s.replace('', '-', 2)
s | replace('o', 0) ~ (n | replace(7, 'x')) ~ (s | replace('l', x))
', '.join(words) ~ ','.join('abc')
', '.join(list_)
list_ | join('-') ~ (users | join(', ', attribute='name')) ~ (none_ | default([]) | join)
none_ | join
'abc'.center(8, '*') ~ 'abc'.ljust(5) ~ '|' ~ 'abc'.rjust(5, '0') ~ '-42'.zfill(6) ~ 'ab'.center(5, 'x')
'a-b-c'.partition('-') ~ 'a-b-c'.rpartition('-') ~ 'abc'.partition('-')
'abc'.removeprefix('a') ~ 'abc'.removesuffix('c') ~ 'abc'.removesuffix('')
'a\\tb\\n\\tc'.expandtabs(4)
'1'.isdigit() ~ 'a1'.isalnum() ~ 'a'.isalpha() ~ ' '.isspace() ~ ''.isspace() ~ 'AB'.isupper() ~ 'ab1'.islower() ~ '\u00b2'.isdigit() ~ '\u00bd'.isnumeric()
1.0 ~ ' ' ~ 1e16 ~ ' ' ~ 1e15 ~ ' ' ~ 0.1 ~ ' ' ~ 1e-5 ~ ' ' ~ 123456789.125 ~ ' ' ~ 1e22 ~ ' ' ~ 0.0001 ~ ' ' ~ 1.5e300
0x1F ~ ' ' ~ 0b101 ~ ' ' ~ 0o17 ~ ' ' ~ 1_000 ~ ' ' ~ 1_0.5
'a' 'b' ~ "c\\x41\\u00e9\\101\\
d\\q"
d | tojson
d | tojson(indent=2)
d | tojson(sort_keys=true, separators=(',', ':'))
u | tojson(ensure_ascii=true)
'</a> & \\'"\\\\\\n\\t\\x01\\x7f' | tojson
[1.0, 1e20, none, true] | tojson
{1: 2, none: 3, true: 4, 1.5: 5} | tojson
x | tojson
[] | tojson(indent=2) ~ ({} | tojson(indent=2)) ~ ([[], {}] | tojson(indent='-'))
namespace() | tojson
s | length ~ (list_ | count) ~ (d | length) ~ (x | length)
n | length
list_ | first ~ (list_ | last) ~ ([] | first) ~ ('abc' | last) ~ (d | first)
list_ | sort ~ (words | sort) ~ (words | sort(case_sensitive=true)) ~ (list_ | sort(reverse=true))
users | sort(attribute='age,name') | map(attribute='name') | list
[1, 'a'] | sort
d | dictsort
{'b': 1, 'A': 2} | dictsort ~ ({'b': 1, 'A': 2} | dictsort(true)) ~ ({'b': 1, 'A': 2} | dictsort(by='value', reverse=true))
words | unique | list ~ ([1, 2, 1] | unique | list)
list_ | min ~ (list_ | max) ~ ([] | max) ~ (words | max)
list_ | sum ~ (users | sum(attribute='age')) ~ ([1.5] | sum(start=1))
list_ | reverse | list ~ ('abc' | reverse)
users | map(attribute='tags', default='none') | list
words | map('upper') | list ~ (words | map('replace', 'b', 'x') | join)
users | selectattr('age', 'equalto', 31) | map(attribute='name') | list
users | rejectattr('tags') | list | length
users | selectattr('tags', 'defined') | list | length
list_ | select('odd') | list ~ (list_ | reject('greaterthan', 1) | list) ~ ([0, 1, ''] | select | list)
users | groupby('age') | list
users | groupby('age') | map('first') | list
(users | selectattr('age', 'eq', 99)) is defined and (users | selectattr('age', 'eq', 99)) is iterable
'yes' if (users | selectattr('age', 'eq', 99)) else 'no'
[1, 2, 3, 4, 5] | batch(2) | list ~ ([1, 2, 3] | batch(2, 'x') | list) ~ ([1, 2, 3, 4, 5] | slice(2) | list) ~ ([1, 2, 3] | slice(2, 'x') | list)
x | default('d') ~ (empty | default('e')) ~ (empty | default('e', true)) ~ (none_ | default('n')) ~ (x | d)
'a\\nb\\n\\nc' | indent ~ '|' ~ ('a\\nb\\n\\nc' | indent(2, true, true)) ~ ('a\\nb' | indent('> '))
'foo bar baz qux' | truncate(9) ~ ('foo bar baz qux' | truncate(9, true)) ~ ('foo bar baz qux' | truncate(11)) ~ ('foo bar baz qux' | truncate(11, false, '...', 0))
'a b, c_d' | wordcount ~ ('a b/\u00e9' | urlencode) ~ ('%s-%s' | format(1, 2)) ~ ('x' | center(5)) ~ '|'
'42' | int ~ ('x' | int) ~ ('x' | int(5)) ~ ('0x1F' | int(base=16)) ~ ('3.9' | int) ~ (3.9 | int) ~ ('1_0' | int) ~ (none_ | int)
'2.5' | float ~ ('x' | float) ~ (n | float) ~ ('1e3' | float) ~ (' 7 ' | float)
42.55 | round ~ ' ' ~ (42.55 | round(1)) ~ ' ' ~ (42.55 | round(1, 'floor')) ~ ' ' ~ (42.55 | round(1, 'ceil')) ~ ' ' ~ (2.5 | round) ~ ' ' ~ (0.5 | round | int)
-3 | abs ~ (-2.5 | abs) ~ ('a' | abs)
1 is odd ~ (2 is even) ~ (6 is divisibleby 3) ~ (1 is number) ~ (1.0 is float) ~ (true is integer) ~ (1 is integer) ~ (true is boolean)
s is string ~ (list_ is sequence) ~ (d is mapping) ~ (d is sequence) ~ (s is iterable) ~ (n is iterable) ~ (none is none) ~ (range is callable)
'ab' is lower ~ ('AB' is upper) ~ (1 is eq 1) ~ (1 is ne 1) ~ (1 is in [1]) ~ ('upper' is filter) ~ ('odd' is test) ~ (x is undefined) ~ (1 is not odd)
none is sameas none ~ (list_ is sameas list_)
n is odd and not n is even
list_ | nosuchfilter
list_ is nosuchtest
(list_ | nosuchfilter) if false else 'ok'
dict(a=1, **{'b': 2}) ~ dict([('c', 3)])
namespace(a=1)
namespace(_a=1)
cycler('a', 'b').next()
joiner(', ')() ~ 'x'
'<b>' | e ~ ('<b>' | safe) ~ (('<b>' | safe) + '<i>') ~ ('<' | escape | length)
s is callable
nested[0][1][0] ~ nested.0.1.1 ~ nested[9]
users[0].name.upper().lower()
(1, 2) + (3,) ~ [1] + [2] ~ [0] * 3 ~ 'ab' * 2 ~ 'ab' * -1
[1] + (2,)
'a' + 1
1 + 'a'
-'a'
not x and not empty
x or 'y' and 'z'
9223372036854775807
strftime_now('%d %b %Y %H:%M:%S %j %A %B %%')
"é\\é"
''
self is defined
"""

BLOCKS = [
    "{% for i in list_ %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex0 }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}",
    "{% for i in [] %}x{% else %}none{% endfor %}{% for i in x %}x{% else %}undef{% endfor %}",
    "{% for i in none_ %}{% endfor %}",
    "{% for i in n %}{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}{% for k, v in d | items %}{{ k }}{% endfor %}",
    "{% for a, b in [(1, 2), (3, 4, 5)] %}{{ a }}{% endfor %}",
    "{% for (a, b), c in [((1, 2), 3)] %}{{ a + b + c }}{% endfor %}",
    "{% for i in range(10) if i % 3 == 0 %}{{ i }}-{{ loop.index }}/{{ loop.length }} {% endfor %}",
    "{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for i in [1] %}{% continue %}{% else %}else{% endfor %}",
    "{% for i in list_ %}{% for j in list_ %}{{ loop.index }}{{ i }}{{ j }} {% endfor %}{{ loop.index }}{% endfor %}",
    "{% for n1 in nested recursive %}{{ loop.depth }}{% if n1 is iterable %}[{{ loop(n1) }}]{% else %}{{ n1 }}{% endif %}{% endfor %}",
    "{% for i in 'ab' %}{{ loop.cycle('x', 'y') }}{{ loop.changed(i) }}{{ loop.changed(1) }}{% endfor %}",
    "{% for i in list_ %}{% set loop = 1 %}{% endfor %}",
    "{% for i in list_ %}{{ loop }}{% endfor %}",
    "{% set a = 1 %}{% for i in list_ %}{% set a = a + i %}{{ a }} {% endfor %}{{ a }}",
    "{% set ns = namespace(a=1) %}{% for i in list_ %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }} {{ ns }}",
    "{% set ns = namespace() %}{{ ns.missing is defined }}{% set ns.x = 1 %}{{ ns.x }}{{ ns['x'] }}",
    "{% set d.x = 1 %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set c = 1, 2 %}{{ c }}",
    "{% set a %}x{{ n }}{% endset %}{{ a }}{% set b | upper | replace('X', 'y') %}x{{ s }}{% endset %}{{ b }}",
    "{% if x %}a{% elif n > 5 %}b{% else %}c{% endif %}{% if none_ is none and t %}d{% endif %}",
    "{% if false %}{% set s = 1 %}{% endif %}{{ s }}",
    "{% for i in [1] %}{{ s }}{% endfor %}{% set s = 'later' %}{{ s }}",
    "{% macro m() %}{{ s }}{% endmacro %}{{ m() }}{% set s = 'later' %}{{ m() }}",
    "{% macro m(a, b='B', c=a) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, 2, 3) }}{{ m(b=1, a=2) }}{{ m() }}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, x=4) }}{{ m() }}",
    "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{% endmacro %}{{ m(b=2) }}",
    "{% macro m(a) %}({{ a }}{{ caller('q') }}){% endmacro %}{% call(x) m(1) %}body {{ x }}{{ n }}{% endcall %}",
    "{% macro m() %}{{ caller() if caller else 'no' }}{% endmacro %}{{ m() }}{% call m() %}yes{% endcall %}",
    "{% macro f(k) %}{{ k }}{{ f(k - 1) if k }}{% endmacro %}{{ f(5) }}",
    "{% macro f(k) %}{% set n = k %}{{ n }}{% endmacro %}{{ f(1) }}{{ n }}{{ f }}{{ f.name }}",
    "{% call 1 %}{% endcall %}",
    "{% filter upper | replace('A', 'b') %}a{{ s }}{% endfilter %}",
    "{% with a = 1, b = n %}{{ a }}{{ b }}{% set a = 5 %}{{ a }}{% endwith %}{{ a }}",
    "{% generation %}{{ s }}{% set n = 1 %}{% endgeneration %}{{ n }}",
    "{% for i in [1, 2] %}{% generation %}{{ loop.index }}{{ i }}{% endgeneration %}{% endfor %}",
    "{% raw %}{{ x }}{% y %}{% endraw %}|{%- raw -%}  a  {%- endraw -%}  b",
    "  {% if t %}\n  a\n  {% endif %}\n  b {# c #}\n  {# d #}\n e",
    "a \n {%- if t -%} \n b \n {%- endif +%}\n c {{- ' d ' -}} \n e",
    "{%+ if t %} x {%+ endif %} \n  {%+ set q = 1 %}y",
    "a\r\nb\rc{{ '\r\n' | length }}\n\n",
    "{# a {{ b }} #}{#- c -#} {{ 1 }}{#+ x +#}\n2",
    "{% print n, s %}",
    "{{ raise_exception('no ' ~ s) }}",
    "{% if t: %}x{% endif %}",
    "{{ {'a': {'b': 1}}['a']['b'] }}{{ {'a':1}}}",
    "{{ }}",
    "{% nosuch %}",
    "{% endif %}",
    "{% if t %}",
    "{{ (1 }}",
    "{{ 'a }}",
    "{{ a & b }}",
    "{% set true = 1 %}",
    "{% set 1 = 1 %}",
    "{{ f(a=1, a=2) }}",
    "{# never closed",
    "{% raw %} never closed",
    "{% include 'x' %}",
    "{% for m in users %}{% if loop.first and m.name == 'Ann' %}{% set found = m.name %}{% endif %}{{ found }}{% endfor %}{{ found is defined }}",
    "{% set outer = [] %}{% for i in list_ %}{% set outer = outer + [i] %}{% endfor %}{{ outer }}",
    "{% set x = x | default('d') %}{{ x }}{% set n = n + 1 if n else 0 %}{{ n }}",
    "{% macro json(v, depth=0) %}{% if v is mapping %}{% for k, i in v.items() %}{{ k }}:{{ json(i, depth + 1) }};{% endfor %}{% elif v is sequence and v is not string %}{% for i in v %}{{ json(i, depth + 1) }},{% endfor %}{% else %}{{ v | tojson }}@{{ depth }}{% endif %}{% endmacro %}{{ json(d) }}",
    "{% set c = cycler('a', 'b') %}{% for i in list_ %}{{ c.next() }}{{ c.current }}{% endfor %}{% set j = joiner('|') %}{% for i in list_ %}{{ j() }}{{ i }}{% endfor %}",
    "{% for i in (list_ | map('string')) %}{{ loop.last }}{{ i }}{% endfor %}",
    "{% set g = list_ | select %}{{ g | list }}{{ g | list }}",
    "{% for c in u %}[{{ c }}]{% endfor %}",
    "{% for i in list_ %}{%- if not loop.last %}{{ i }}, {% else %}{{ i }}{% endif -%} {% endfor %}",
    "{% set items = d.items() %}{{ items }}{{ d.keys() }}{{ d.values() }}",
]


def main():
    env = environment()
    sources = ["{{ " + line + " }}" for line in EXPRESSIONS.strip("\n").replace("\\\n", "\\\0").split("\n")]
    cases = []
    for source in [source.replace("\0", "\n") for source in sources] + BLOCKS:
        try:
            rendered = env.from_string(source).render(**CONTEXT)
        except Exception:  # whatever Python raises in a template
            rendered = None
        if rendered is not None and " at 0x" in rendered:
            sys.exit(f"{source}: prints an address")
        cases.append([source, rendered])
    json.dump({"context": CONTEXT, "cases": cases}, sys.stdout, indent=0)
    print()


if __name__ == "__main__":
    sys.exit(main())
