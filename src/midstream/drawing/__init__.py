"""Pictures of a flow and of a planned change: text, Mermaid, SVG."""
