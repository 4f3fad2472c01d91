"""The site of docs/: its reference pages, made from what the programs and schemas say, and links.

`python -m tests.docs` writes the pages of docs/pages/reference anew; tests/unit/test_docs.py
compares them. `python -m tests.docs links` checks the links of all Markdown files, without the
network.
"""
