from penstock.algorithms.graph.functions import pair_responses


def test_the_chosen_response_is_the_first_sample_and_the_rejected_the_second():
    chosen, rejected = [7, 8, 9], [7, 0]
    responses, preferred = pair_responses([chosen, chosen], [rejected, rejected])
    assert responses == [chosen, rejected]
    assert preferred == [1.0, -1.0]
