"""bertsmith: raw text to a working BERT.

Each command is a function too: `bertsmith.data.vocabulary.train_tokenizer`, `bertsmith.data.build.build_corpus`,
`bertsmith.pretrain.pretrain`, `bertsmith.finetune.finetune`, `bertsmith.answers.evaluate`, `predict`, `fill`, and the
`Predictor` behind the last three.
"""

__version__ = "0.1.0"
