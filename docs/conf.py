"""The site built from these pages by `make docs`; warnings, broken links and broken anchors among them, are errors."""

project = "Slipstream"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 4
html_theme = "alabaster"
html_title = "Slipstream"
html_theme_options = {
    "description": "EAGLE-3 speculative decoding, end to end",
    "page_width": "1100px",
    "fixed_sidebar": True,
}
html_show_copyright = False
html_copy_source = False
