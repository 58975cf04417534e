"""FedMRL: Federated Model Heterogeneous Matryoshka Representation Learning (Yi et al., NeurIPS 2024, arXiv 2406.00488).

Every node keeps its own private model F and adds a small shared one G; their representations are fused by the
node's own projector P and trained as Matryoshka slices; the server averages G.

Differences from the paper by default, and what taking each one away costs (points of mean accuracy, three seeds; the tables
stand in benchmarks/RESULTS.md). `fedmrl.preset = "paper"` takes all of them away; tensors and exchange are the same.
- The projector starts as `aligned` (0.1 x random plus two identities; the same on nodes of one width) instead of
  random on each node: G's head reads the projected vector, so nodes with different projectors train G in different
  bases. 3.9 points (WISDM)
- `own-weight` 1: G is also trained on its own representation, or it stops learning once F fits the node's samples. 0.9 (WISDM)
- `masked-loss`: G's head leaves out classes that the node has no training sample of, in its losses and in what the node
  predicts (restricted softmax; Li and Zhan, KDD 2021): else each node trains it to deny the others' classes.
  2.9 (CIFAR-10, two classes a node), nothing where every node has every class
- `predict = "all"`: a node answers with the mean of three probabilities: both heads on the fused vector, and G's head on its
  own representation. The paper's mix-large is the private head alone. Not always worth it: -0.8 (WISDM)
Together they are worth 6.8 points on WISDM, 5.6 on CIFAR-10 with two classes a node, 20.1 on equal splits of the digits.
A node whose F and P have not been trained yet predicts with G alone.

Other differences, which no setting takes away
- n_k, the weight of the average, counts the training samples used, over the nodes that replied.
- A fresh optimiser each round on each node; the released code shares one optimiser's momentum between nodes.
- Evaluation is with the newest average, on all nodes.
- Buffers of a small model with BatchNorm: float statistics are averaged with the weights; counters are not
  averaged, the largest is kept.
The average is a true weighted mean: the released code averages live references, which equals its last node's model.
"""
