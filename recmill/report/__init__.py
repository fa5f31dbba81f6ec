"""One self-contained HTML page about a run, made of plain values: facts, tables and our own SVG charts."""
