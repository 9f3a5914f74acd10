r"""Answers that are not equal: `one ~ other` on each line. Read by test_math_pairs."""

# ruff: noqa: RUF001
UNEQUAL = r"""
5,5 ~ 5
\text{May 5} ~ May 6
\text{x-1} ~ x+1
7 or 8 ~ 7
7 or 8 ~ 8
7, 8 ~ 7
7 ~ 7 or 8
x = 7 or x = 8 ~ 8
7 or 8 ~ 7 or 9
7 and 8 ~ 8
1,2,3 ~ 1,2
3e8 ~ 3e7
3e8 ~ 38
3\times10^8 ~ 3\times10^7
3\times 10^8 ~ 3108
2 1/2 ~ 21/2
2 1/2 ~ 1
2\frac{1}{2} ~ 1
2\frac{1}{2} ~ \frac{1}{2}
1/2 ~ 2
\frac{1}{2} ~ \frac{1}{3}
0.33 ~ \frac{1}{3}
0.333 ~ \frac{1}{3}
0.3333 ~ 1/3
3.14 ~ \pi
3.1416 ~ \pi
22/7 ~ \pi
1.414 ~ \sqrt{2}
0.0000001 ~ 0.0000002
0.0000001 ~ 0
1000000 ~ 1000001
1234567.1 ~ 1234567.2
0.9 ~ 0.99
0.\overline{3} ~ 0.3
0.333... ~ 0.333
0.1\overline{6} ~ 0.16
1,234 ~ 1.234
1,234 ~ 234
1,234 ~ 1
12,34 ~ 1234
50\% ~ 5
50\% ~ 500
0.5\% ~ 50
5\% ~ 0.5
90^\circ ~ 9
90^\circ ~ 45^\circ
7 cm ~ 7 m
7 cm ~ 7 cm^2
\$36 ~ €36
3 hours ~ 3 minutes
7 apples ~ 8 apples
5 million ~ 5
x=5 ~ 6
x=5 ~ y=5
y = 2x+1 ~ y = 2x-1
y=2x+1 ~ 2x+2
x^2+y^2=25 ~ x^2+y^2=5
2x = 10 ~ 10
2x=10 ~ 2
x > 3 ~ x \ge 3
x > 3 ~ x < 3
x > 3 ~ 3
3 < x ~ x < 3
1 < x < 2 ~ 1 \le x \le 2
1 < x < 2 ~ [1, 2]
(1,2) ~ [1,2]
(1,2] ~ [1,2)
(1,2) ~ (2,1)
(1,2) ~ \{1,2\}
(1,2) ~ (1,3)
(1,2) ~ 1
(1,2,3) ~ (1,2)
\{1,2\} ~ \{1,2,3\}
\{1,2\} ~ 1
\{1,2\} ~ \{1,3\}
(-\infty,1)\cup(2,\infty) ~ (-\infty,1)
(-\infty,1)\cup(2,\infty) ~ (-\infty,1]\cup(2,\infty)
\emptyset ~ 0
\emptyset ~ \{0\}
\pm 3 ~ 3
\pm 3 ~ -3
3 ~ \pm 3
\pm 3 ~ \pm 2
1\pm\sqrt2 ~ 1+\sqrt2
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ~ \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} ~ \begin{pmatrix} 1 & 2 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ~ 1
\sqrt{2} ~ 2
\sqrt{8} ~ 4
\sqrt{2} ~ \sqrt{3}
\sqrt[3]{8} ~ \sqrt{8}
2\pi ~ \pi
2\pi ~ 2
\pi ~ 3
\frac{\pi}{2} ~ \frac{2}{\pi}
x+1 ~ x-1
x^2 ~ x
x ~ y
x ~ X
2x ~ 2
(x+1)^2 ~ x^2+1
\sin x ~ \cos x
\text{Tuesday} ~ Thursday
Tuesday ~ yadseuT
\text{Yes} ~ no
no ~ on
x=2, y=3 ~ x=3, y=2
\text{even} ~ odd
A ~ B
(A) ~ (B)
1011_2 ~ 1011_3
1011_2 ~ 1011
1011_2 ~ 1101_2
2516_8 ~ 2516
−5 ~ 5
-5 ~ 5
5^2 ~ 52
5² ~ 52
2^3 ~ 23
2^3 ~ 6
|{-3}| ~ -3
3+4i ~ 3-4i
i ~ 1
\infty ~ -\infty
\infty ~ 10^{100}
? ~ 7
7? ~ 8
\frac{1}{0} ~ 0
1/0 ~ 1
n! ~ n
5! ~ 5
10^6 ~ 10^5
x \ne 3 ~ 3
x \ne 3 ~ x = 3
-7 ~ 7
not 7 ~ 7
at least 7 ~ 7
7x ~ 7
7y ~ 7x
1 2 ~ 12
1.2.3 ~ 1.23
3:4 ~ 3
7 8 ~ 8
\frac{3}{4} ~ 34
3-4 ~ 34
\sqrt{18} ~ 2\sqrt{3}
0.\overline{12} ~ 0.12
0.\overline{12} ~ 0.1\overline{2}
5\% ~ 0.005
x<2 \text{ or } x>5 ~ (2,5)
x > 5 ~ x < 2 or x > 5
[-1,1] ~ (-1,1)
\{-1,0,1\} ~ \{0,1\}
2\frac{1}{3} ~ \frac{2}{3}
10:30 ~ 10:31
3:2 ~ 2:3
x^2-1 ~ x^2+1
e^{i\pi} ~ 1
\text{no solution} ~ infinitely many
A ~ a
101_2 ~ 101_3
a=1, b=2 ~ a=2, b=1
0, 1, 2 ~ 0, 1
k=0 ~ 1
\sin x ~ \sin 2x
\frac{-1+\sqrt5}{2} ~ \frac{-1-\sqrt5}{2}
1,000 ~ 1
5, 6 ~ 56
5.0001 ~ 5
100000001 ~ 100000000
1e10 ~ 1e11
y=3x-2 ~ y=3x+2
(1,2),(3,4) ~ (1,2),(4,3)
\begin{pmatrix}1\\2\end{pmatrix} ~ \begin{pmatrix}2\\1\end{pmatrix}
10\text{ kg} ~ 10 \text{ g}
60\text{ km/h} ~ 60\text{ m/s}
x \ge 2 ~ x \le 2
x=3 or x=3 ~ 3
2 and 3 ~ 5
2+3 ~ 23
12:00 ~ 1:00
12:00 pm ~ 12:00 am
4:30 ~ 4:45
3:4 ~ 4:3
1:2:3:\ldots ~ 1:4:9:\ldots
\frac{1}{2004!} ~ \frac{1}{2006!}
2^{100}-1 ~ 2^{100}
1-2^{-100} ~ 1
1-\frac{1}{e^{100}} ~ 1
e^{-1000} ~ e^{-1001}
\binom{2004}{1002}^{-1} ~ \binom{2004}{1001}^{-1}
\frac{x}{2004!} ~ \frac{x}{2006!}
10^{-40} ~ 0
AB ~ BA
|x| ~ x
x=2, y=3 ~ (3,2)
7 \pmod{10} ~ 7 \pmod{11}
1331 and 1728 ~ 1728
(1,2),(3,4) ~ (1,2)\cup(3,4)
\max(i, 5) ~ 5
\frac{d}{di} i ~ 1
5 ~ \sum_{i=1}^{4} 1
i\sum_{i=1}^{n} i ~ 5
n(n-i) ~ n^2+ni
n ~ m+i-i
"""

CONTRADICTORY = (r"7 \ne 7", "8=7", "8 = 7 = 7", "x = 5 = 6", "3+4=8", "7 = 7 = 8", "x=", "=")
"""They equal nothing, themselves included."""
