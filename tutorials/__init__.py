"""The tutorials, and what they share: `helpers` for pictures, `checks` for exercises."""
