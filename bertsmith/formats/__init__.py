"""Model folders of other systems, in and out."""
