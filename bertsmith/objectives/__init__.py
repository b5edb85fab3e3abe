"""Pre-training objectives: modules that own an encoder and map a batch to named losses."""
