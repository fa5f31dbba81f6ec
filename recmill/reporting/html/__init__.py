"""One self-contained HTML page of facts, tables and SVG charts."""
