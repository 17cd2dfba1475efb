"""Recorded drafts, and what any budget policy would have made of them on any machine."""
