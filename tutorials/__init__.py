"""The tutorials, and what they share: `helpers` (pictures) and `checks` (exercises)."""
