"""Tools as Kimi K2.5 reads them."""

from slipstream.serve.tools.typescript import sorted_keys, typescript_of

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["C", "F"], "default": "C"},
                "city": {"type": "string", "description": "Where.", "maxLength": 9},
                "near": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
            },
            "required": ["city"],
            "$defs": {"Place": {"type": "object", "properties": {"lat": {"type": "integer"}}}},
        },
    },
}


def test_tools_are_declared_in_typescript_what_is_required_first():
    assert typescript_of(sorted_keys([TOOL])) == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "interface Place {\n  lat?: number\n}\n"
        "// Tells the weather.\n"
        "type weather = (_: {\n"
        "  // Where.\n  // maxLength: 9\n  city: string,\n"
        "  near?: Array<Place>,\n"
        '  // Default: "C"\n  unit?: "C" | "F"\n'
        "}) => any;\n}\n"
    )


def test_a_schema_that_the_format_has_no_word_for_leaves_the_tools_as_json():
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"oneOf": []}}}}}
    assert typescript_of([wrong]) is None
