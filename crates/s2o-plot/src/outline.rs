//! The outline of the union of tiles.

use super::tile::Tile;

/// A corner as (key, query).
type Corner = (usize, usize);

/// Largest number of parts between the edges of all tiles. If there are more, each tile gets its own outline.
const MOST_PARTS: usize = 1 << 24;

/// The line segments of the outline of the union of `tiles`.
pub fn of_union(tiles: &[Tile]) -> Vec<[Corner; 2]> {
    let tiles = || tiles.iter().filter(|tile| !tile.keys.is_empty() && !tile.queries.is_empty());
    let edges = |ends: &dyn Fn(&Tile) -> [usize; 2]| {
        let mut edges: Vec<usize> = tiles().flat_map(ends).collect();
        edges.sort_unstable();
        edges.dedup();
        edges
    };
    let keys = edges(&|tile| [tile.keys.start, tile.keys.end]);
    let queries = edges(&|tile| [tile.queries.start, tile.queries.end]);
    if keys.len().saturating_mul(queries.len()) > MOST_PARTS {
        return tiles().flat_map(of_one).collect();
    }

    // Whether each part between edges is covered, with a border of uncovered parts.
    let columns = keys.len() + 1;
    let mut covered = vec![false; columns * (queries.len() + 1)];
    let index = |edges: &[usize], edge: usize| edges.partition_point(|other| *other < edge) + 1;
    for tile in tiles() {
        let span = index(&keys, tile.keys.start)..index(&keys, tile.keys.end);
        for row in index(&queries, tile.queries.start)..index(&queries, tile.queries.end) {
            covered[row * columns..][span.clone()].fill(true);
        }
    }
    let covered = |column: usize, row: usize| covered[row * columns + column];

    let mut outline = Vec::new();
    for (i, &key) in keys.iter().enumerate() {
        let is_edge = |row: usize| covered(i, row) != covered(i + 1, row);
        outline.extend(runs(queries.len(), is_edge).map(|(from, to)| [(key, queries[from]), (key, queries[to])]));
    }
    for (i, &query) in queries.iter().enumerate() {
        let is_edge = |column: usize| covered(column, i) != covered(column, i + 1);
        outline.extend(runs(keys.len(), is_edge).map(|(from, to)| [(keys[from], query), (keys[to], query)]));
    }
    outline
}

fn of_one(tile: &Tile) -> [[Corner; 2]; 4] {
    let (keys, queries) = (&tile.keys, &tile.queries);
    let corners =
        [(keys.start, queries.start), (keys.end, queries.start), (keys.end, queries.end), (keys.start, queries.end)];
    [0, 1, 2, 3].map(|i| [corners[i], corners[(i + 1) % 4]])
}

/// The first and last edge of each run of parts on an outline, among parts 1 to `edges` - 1.
fn runs(edges: usize, is_edge: impl Fn(usize) -> bool) -> impl Iterator<Item = (usize, usize)> {
    let mut runs = Vec::new();
    let mut from = None;
    for part in 1..=edges {
        match (part < edges && is_edge(part), from) {
            (true, None) => from = Some(part - 1),
            (false, Some(first)) => {
                runs.push((first, part - 1));
                from = None;
            }
            _ => {}
        }
    }
    runs.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(keys: std::ops::Range<usize>, queries: std::ops::Range<usize>) -> Tile {
        Tile { queries, keys }
    }

    #[test]
    fn what_tiles_share_is_not_outlined() {
        let mut outline = of_union(&[tile(0..4, 0..4), tile(4..8, 0..4), tile(0..4, 4..8)]);
        outline.sort();
        let corners = [(0, 0), (0, 8), (4, 4), (4, 8), (8, 0), (8, 4)];
        let expected = [
            [corners[0], corners[1]],
            [corners[0], corners[4]],
            [corners[1], corners[3]],
            [corners[2], corners[3]],
            [corners[2], corners[5]],
            [corners[4], corners[5]],
        ];
        assert_eq!(outline, expected);
    }

    #[test]
    fn tiles_apart_have_outlines_of_their_own_and_empty_ones_none() {
        assert_eq!(of_union(&[tile(0..1, 0..1), tile(2..3, 0..1)]).len(), 8);
        assert!(of_union(&[tile(0..0, 0..1)]).is_empty());
        assert!(of_union(&[]).is_empty());
    }
}
