"""The front door: turns a client's request into one prefill and one decode on two workers, and streams the answer.

Life of a request here:

 1. server.py        decodes the message, calls FrontDoor.open with plain values
 2. front_door.py    tokenizes (tokenizer.py, chat_template.py), validates, classifies (classifier.py: input length x
                     SLA class), gives it a place in the table of running requests
 3. request.py       drives it from queued to its one end, within its deadline, over one or more attempts
 4. admission.py     waits in a bounded, deadline-ordered queue of its class until a pair has room
 5. placement.py     picks the least loaded healthy pair of one fingerprint out of pools.py
 6. attempt.py       submits to the decode worker (decode_session.py: one stream per worker), waits for Reserved,
                     sends the prompt and the transfer target to the prefill worker (prefill_call.py)
 7. choice.py        first token from prefill, all others from decode: whole characters (detokenizer.py), stop strings
                     (stop.py), logprobs; deltas wait here until the client takes them
 8. attempt.py       a worker fails: what is unfinished is attempted again, prompt and delivered tokens as the new
                     prompt, elsewhere; the client's stream goes on without a gap or a repeat
 9. request.py       finished, a typed error, or cancelled; both workers are told, one log line, metrics (metrics.py)

Workers come and go through Registry.Join: registry_server.py, pools.py (leases, incarnations), breaker.py (health).
"""
