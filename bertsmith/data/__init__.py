"""From raw text to batches: readers, shards, segment pairs, masking, loader."""
