mkfifo /run/ask /run/answer
python3 -c '
import math
primes = [n for n in range(2, 100000) if all(n % d for d in range(2, math.isqrt(n) + 1))]
open("/run/warm", "w").close()
while True:
    with open("/run/ask") as ask:
        question = ask.read()
    with open("/run/answer", "w") as answer:
        print(eval(question), file=answer)
' </dev/null >/dev/null 2>&1 &
while ! [ -f /run/warm ]; do usleep 10000; done
