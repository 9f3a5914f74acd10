"""Rotary embedding in few calls, against complex numbers."""

from __future__ import annotations

import torch

from milescli.backends.sglang.cpu.elementwise import Rotations, rotate

HEADS, SIZE = 3, 8


def table(num_positions: int) -> torch.Tensor:
    """[positions, SIZE] cosines, then sines, as SGLang keeps them."""
    angles = torch.outer(torch.arange(num_positions), 10.0 ** -torch.arange(SIZE // 2))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The halves of each head are real and imaginary parts."""
    real, imaginary = x.view(len(x), HEADS, SIZE).double().chunk(2, dim=-1)
    angles = torch.outer(positions, 10.0 ** -torch.arange(SIZE // 2).double())
    result = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((result.real, result.imag), dim=-1).view(x.shape).float()


def test_a_head_is_turned_by_its_position():
    x, positions = torch.randn(5, HEADS * SIZE), torch.tensor([0, 3, 1, 3, 30])
    before = x.clone()
    got = rotate(x, *Rotations().at(positions, table(31)))
    assert torch.allclose(got, turned(x, positions.double()), atol=1e-6)
    assert torch.equal(x, before)


def test_a_pass_has_its_own_positions_also_in_the_tensor_of_the_one_before():
    rotations, positions, known = Rotations(), torch.tensor([2, 7]), table(20)
    first = rotations.at(positions, known)
    assert rotations.at(positions, known)[0] is first[0], "layers of one pass make it once"
    other = rotations.at(positions, known.flip(0))
    assert not torch.equal(other[0], first[0]), "another table has other cosines"
    positions += 4
    rotations.forget()
    later = rotations.at(positions, known)
    x = torch.randn(2, HEADS * SIZE)
    assert torch.allclose(rotate(x, *later), turned(x, positions.double()), atol=1e-6)
