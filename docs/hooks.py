"""Underscores are subscripts here: X_k, Σ_{p,a} and their like in docstrings are not emphasis. Asterisks are."""

from markdown import Extension, Markdown
from markdown.inlinepatterns import SimpleTextInlineProcessor


class PlainUnderscores(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(SimpleTextInlineProcessor(r"(_)", md), "plain_underscore", 61)  # emphasis has 60


def on_config(config):
    config.markdown_extensions.append(PlainUnderscores())
    return config
