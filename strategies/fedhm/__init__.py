"""FedHM: one full model on the server, low-rank factors of it at each node's own rank (Yao et al., 2021, arXiv 2111.14655).

"FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization": the server cuts the full
model by truncated SVD to each node's rank, nodes train the factors, the server multiplies them out and averages. All
nodes hold one architecture, `fedhm.model`, at their own rank ratio; `fleet.models` is not read.

A round: every node gets the dense layers and, of the others, a prefix of one set of factors; it trains with a fresh
optimiser (the basis is a new one each round) and keeps nothing. Ratio 1 is the full model, dense.

Differences from the paper
- Weights of the average are the paper's softmax(ratio / temperature) over the nodes that replied, without sample
  counts; `fedhm.times-samples` multiplies them in. `code` is what the authors' program does, another formula.
- The decay lambda/2 |U V^T|^2 acts on the factors alone and `train.weight-decay` on everything else; the authors'
  program applies both to the factors. With `fedhm.frobenius-decay` = 0 the factors get `train.weight-decay`.
- BatchNorm: see `strategies.fedhm.norms`. The authors evaluate with the statistics of the test batch (`batch`); the
  default, `recalibrate`, does not depend on how the test set is cut into batches. Counters are never averaged.
- One decomposition for each layer and round, of which every tier is a prefix, instead of one for each tier.
- The last layer, 1x1 and depthwise convolutions, children of attention and tied layers stay full, and so does a layer
  whose factors would save nothing. `fedhm.rho` counts the first layers kept full: 3 for ResNet-18, 15 for ResNet-34
  are the published settings.
- A round without the largest tier: `accept` takes the average as it is, so that directions beyond the ranks that
  replied are lost with plain averaging; `history` lets the server's own model take part as one more full node, as the
  authors' program does; delta aggregation keeps them anyway.
- `fedhm.aggregation` = `delta` adds to the full model what the nodes changed, since with the paper's average every
  direction beyond the smallest rank shrinks each round; `delta-decay` lies between.
- Full-rank warm-up rounds need nodes that can hold the full model; off by default, as in the authors' program.
Factors cut parameters, traffic and arithmetic, not the activations kept in training: a node that lacks memory for those
is not helped.
"""
