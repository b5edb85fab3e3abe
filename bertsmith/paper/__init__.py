"""The paper's tables as commands."""
