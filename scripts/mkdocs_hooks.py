"""Hooks of mkdocs.yml. Pages link to files of the project that are not pages (`../engine/eval_score.h`): on the site, which does
not have them, such a link is the file's path as text."""
import pathlib
import posixpath
import re


def on_page_markdown(markdown, page, config, files):
    folder = posixpath.dirname(page.file.src_uri)

    def replace(match):
        text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group(0)
        path = posixpath.normpath(posixpath.join("docs", folder, target.partition("#")[0]))
        if path.startswith("docs/") and files.get_file_from_path(path.removeprefix("docs/")) is not None:
            return match.group(0)
        return text if text.startswith("`") else f"{text} (`{path}`)"

    return re.sub(r"(?<!!)\[([^]]+)\]\(([^)\s]+)\)", replace, markdown)


def on_post_build(config):
    """The site begins with the start page."""
    pathlib.Path(config["site_dir"], "index.html").write_text('<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=start.html">\n')
