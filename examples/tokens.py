"""Token ids instead of text: tokenize, score a sentence token by token, and draw three continuations of one prompt.

Start `twinpool up` in another terminal, then:

    python examples/tokens.py
"""

from twinpool import Client

with Client() as client:
    model = client.models()[0]
    print(f"{model.name}: {model.architecture}, {model.context_length} tokens of context")

    ids = client.tokenize("The sky is blue because")
    print("token ids:", ids)
    assert client.detokenize(ids) == "The sky is blue because"

    # echo and logprobs: how likely the model finds each token of the prompt, and what it would have said instead
    scored = client.generate(ids, max_tokens=1, echo=True, logprobs=1)
    for token in scored.logprobs[1:-1]:
        best = token.top[0]
        print(f"{token.text!r:>12} {token.logprob:7.2f}   likeliest: {best.text!r} {best.logprob:.2f}")

    # the prompt is computed and shipped once for all three
    answer = client.generate(ids, n=3, max_tokens=16, temperature=0.8, seed=7)
    for choice in answer.choices:
        print(f"{choice.index}: {choice.text.strip()!r} ({choice.finish_reason})")
    print(answer.usage)
