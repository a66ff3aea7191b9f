"""The model: tensors in, tensors out. Imports torch and itself only, so that an export carries it.

Shape letters used in every comment of this package:
    B batch, T length, D hidden size, H heads, K size of one head, F feed-forward size,
    V vocabulary rows, M masked places of the batch, N layers

Read in this order: config, presets, positions, embeddings, flex, tiled_attention, attention,
blocks, stacks, heads, language_model, classifier, init.
"""
