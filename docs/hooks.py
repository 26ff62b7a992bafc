"""What the pages need beside Markdown: subscripts left alone, formulas as MathML, notebooks as pages.

Underscores are subscripts here: X_k, Σ_{p,a} and their like in docstrings are not emphasis. Asterisks are. Formulas
become MathML when the site is built, so that they show without a network and without scripts.
"""

import html
import json
import re
from pathlib import Path

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import SimpleTextInlineProcessor
from mkdocs.structure.files import File

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
GALLERY_HERE = "<!-- gallery -->"
README, TABLE_HERE = NOTEBOOKS.parent / "README.md", "<!-- README table -->"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
TAG = re.compile(r"\\tag\{(.*?)\}")


class PlainUnderscores(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(SimpleTextInlineProcessor(r"(_)", md), "plain_underscore", 61)  # emphasis has 60


def on_config(config):
    config.markdown_extensions.append(PlainUnderscores())
    return config


def on_page_markdown(markdown, **_):
    """Where a page asks for them: the README's table, which a script makes of measurements, and the gallery."""
    if GALLERY_HERE in markdown:
        return markdown.replace(GALLERY_HERE, _gallery())
    if TABLE_HERE not in markdown:
        return markdown
    table = README.read_text(encoding="utf-8").split("<!-- table -->")[1].split("<!-- end of table -->")[0]
    return markdown.replace(TABLE_HERE, table)


def _gallery() -> str:
    """A card for each notebook: its last picture, its title, and the words of the README's table."""
    words = dict(re.findall(r"\| \[(\w+)\]\(notebooks/\S+\) \| (.*?) \|", README.read_text(encoding="utf-8")))
    cards = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        title = "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ")
        pictures = [out["data"]["image/png"] for cell in cells for out in cell.get("outputs", []) if _is_picture(out)]
        image = f'<img alt="" src="data:image/png;base64,{"".join(pictures[-1]).strip()}">'
        about = html.escape(words[path.stem])
        cards.append(f'<a href="{path.stem}.html">{image}<b>{html.escape(title)}</b><span>{about}</span></a>')
    return f'<div class="gallery">{"".join(cards)}</div>'


def _is_picture(output: dict) -> bool:
    return "image/png" in output.get("data", {})


def on_page_content(content, **_):
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match) -> str:
    kind, bracket, source = match.groups()
    source = html.unescape(source)
    number = TAG.search(source)
    is_block = bracket == "["
    formula = convert(TAG.sub("", source).strip(), display="block" if is_block else "inline")
    label = f'<span class="number">({number.group(1)})</span>' if number else ""
    if is_block:
        return f'<{kind} class="formula block"><{kind} class="scroll">{formula}</{kind}>{label}</{kind}>'
    return f'<{kind} class="formula">{formula}</{kind}>'


def on_files(files, config):
    """A page for each notebook, with the outputs that are stored in it."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text = _page(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def _page(notebook: dict) -> str:
    return "\n\n".join(part for cell in notebook["cells"] for part in _cell(cell))


def _cell(cell: dict):
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield re.sub(r"\]\((?!http)([^)#]*?)\.ipynb\)", r"](\1.md)", source)
        return
    yield f"```python\n{source}\n```"
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if _is_picture(output):
            yield f'<img alt="output" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
        elif text := "".join(output.get("text", data.get("text/plain", []))):
            yield f"```text\n{text.rstrip()}\n```"
