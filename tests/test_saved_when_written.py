"""A page that is published, pushed out before it was saved, and published again is saved when its second batch has written it."""

from support import ByHand, prompt


def test_a_save_waits_for_the_latest_batch_that_wrote_the_page():
    hand = ByHand(gpu_rows=4, cpu_rows=2, disk=True, copy_rows=1)  # two slab rows: one save at a time
    for slot in range(8):
        hand.driver.add_slot((0, slot))
    tokens = prompt(3, seed=1)
    hand.release(hand.publish(tokens, ready=1))
    hand.finish_copies(ok=False)
    hand.finish_copies(ok=False)
    hand.finish_all()  # so only the third page is saved; it keeps the records of the two above alive
    push_out(hand)
    assert hand.where(tokens) == [(0, 0, 0), (0, 0, 0), (0, 2, 2)]

    other = hand.publish(prompt(1, seed=2), ready=2)  # its save is under way from here on
    hand.release(other)
    hand.release(hand.publish(tokens, ready=3), 3)
    push_out(hand, pages=3)  # before they could be saved
    again = hand.publish(tokens, ready=9)
    assert hand.where(tokens)[:2] == [(2, 0, 0), (2, 0, 0)]
    fences = []
    while hand.copies or hand.ops:
        fences += [fence for _, up, _, _, fence in hand.copies if not up]
        hand.finish_copies()
        hand.finish_ops()
    assert fences == [2, 9, 9]
    hand.release(again, 9)


def push_out(hand: ByHand, pages: int = 4) -> None:
    crowd = hand.lease(prompt(pages, seed=99))
    assert crowd
    hand.release(crowd)
