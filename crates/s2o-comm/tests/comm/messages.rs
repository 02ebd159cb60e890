//! Messages of the host.

use s2o_comm::{CommError, MAX_MESSAGE};

use s2o_testkit::ranks::run;

#[test]
fn exchange_gives_all_messages_to_all() {
    for world_size in 1..=4 {
        // The lengths differ, and the messages of rank 0 are empty.
        let message = |rank: usize| vec![rank as u8; rank * 1000];
        let results = run(world_size, |group| {
            for _ in 0..3 {
                group.exchange(b"before").unwrap();
            }
            group.exchange(&message(group.rank())).unwrap()
        });
        let expected: Vec<_> = (0..world_size).map(message).collect();
        assert!(results.iter().all(|result| *result == expected), "{world_size} ranks");
    }
}

#[test]
fn largest_message_passes_and_a_larger_one_is_refused() {
    let results = run(3, |group| {
        let refused = group.exchange(&vec![0; MAX_MESSAGE + 1]).unwrap_err();
        assert!(matches!(refused, CommError::Size { name: "message", .. }), "{refused}");
        group.exchange(&vec![7; MAX_MESSAGE]).unwrap().iter().map(Vec::len).collect::<Vec<_>>()
    });
    assert_eq!(results, vec![vec![MAX_MESSAGE; 3]; 3]);
}

#[test]
fn agree_names_the_rank_that_differs_on_every_rank() {
    let results = run(4, |group| {
        group.agree("the model", "tiny").unwrap();
        let value = if group.rank() == 2 { "large" } else { "small" };
        let error = group.agree("the preset", value).unwrap_err();
        // The group is still usable.
        group.agree("the model", "tiny").unwrap();
        error
    });
    for error in results {
        let CommError::Disagree { what, rank, expected, got } = &error else { panic!("{error}") };
        assert_eq!((*what, *rank, expected.as_str(), got.as_str()), ("the preset", 2, "small", "large"));
    }
}

#[test]
fn agree_on_different_things_is_out_of_step() {
    let errors = run(2, |group| {
        let what = ["the model", "the preset"][group.rank()];
        group.agree(what, "same").unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, CommError::OutOfStep { rank: 1, .. })), "{errors:?}");
}

#[test]
fn candle_keeps_the_error() {
    let error = candle_core::Error::from(CommError::Lost { rank: 3 });
    assert!(error.to_string().contains("rank 3 was lost"), "{error}");
}
