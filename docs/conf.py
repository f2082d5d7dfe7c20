# SPDX-License-Identifier: MIT
"""How Sphinx builds the documentation: ``python -m sphinx -W docs build/docs``."""

import cunorm

project, author = "cunorm", "cunorm contributors"
copyright = "cunorm contributors, MIT licence"
version = release = cunorm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!cunorm\.).*")]  # only names of cunorm must be links

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have shapes and dtypes; arrays may be of any framework
napoleon_google_docstring = False
napoleon_use_param = False  # keep arguments that share a description together
default_role = "py:obj"  # make `name` in a docstring a link
highlight_language = "text"  # formulas in docstrings are not Python

html_theme = "furo"
html_title = f"cunorm {version}"
html_static_path = ["_static"]
html_css_files = ["cunorm.css"]
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"
