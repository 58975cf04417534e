"""FedMRL: Federated Model Heterogeneous Matryoshka Representation Learning (Yi et al., NeurIPS 2024, arXiv 2406.00488).

Every node keeps its own private model F and adds a small shared one G; their representations are fused by the
node's own projector P and trained as Matryoshka slices; the server averages G.

Differences from the paper
- The projector starts as `aligned` (0.1 x random plus two identities; the same on nodes of one width) instead of
  random on each node: G's head reads the projected vector, so nodes with different projectors train G in different
  bases. `fedmrl.projector-start = "random"` is the paper's. Tensors and exchange are the same.
- n_k, the weight of the average, counts the training samples used, over the nodes that replied.
- A fresh optimiser each round on each node; the released code shares one optimiser's momentum between nodes.
- Evaluation is the fused model (the paper's mix-large) with the newest average, on all nodes.
- Buffers of a small model with BatchNorm: float statistics are averaged with the weights; counters are not
  averaged, the largest is kept.
The average is a true weighted mean: the released code averages live references, which equals its last node's model.
"""
