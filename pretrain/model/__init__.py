"""The model: tensors in, tensors out. Imports torch and itself only, because exports carry it.

Shape letters in the comments of this package:
    B batch, T length, D hidden size, E size of token vectors, H heads, K size of a head,
    F feed-forward size, V vocabulary rows, M target positions, C classes, N layers, L latents

Inputs that several modules share:
    document_ids      Integers [B, T]: the document of each token, 0 for padding. A token sees only
                      its own document, and its position is counted from the document's start.
                      Or bool [B, T], where every row is one document: True for tokens, False for
                      padding. The mask is then one number per key instead of one per pair.
                      Or None, where every row is one document without padding.
                      For causal models padding that bool ids mark must follow the tokens; integers
                      allow it anywhere.
    target_positions  [M] flat indices into the [B * T] batch at which outputs are wanted; or None,
                      for outputs everywhere.
    segment_ids       Integers [B, T]: the segment of each token, from 0, in models with `segments`;
                      or None, where all are in segment 0.

Read in this order: config, presets, masks, biases, positions, embeddings, flex, tiled_attention,
attention, layers, perceiver, encoder, heads, classification, language_model, init.
"""
