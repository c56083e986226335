"""The same update on any number of ranks: gradients are summed over leaves in a fixed tree (`docs/contract.md`).

An update's batch is dealt to L leaves, a power of two, by the data's order alone. Rank r of W computes leaf i * W + r
in round i, so the ranks of a round hold neighbours, and a reduce-scatter adds a subtree.
"""
